# SPDX-License-Identifier: Apache-2.0
"""Write the bundled model's word-level tokenizer from its vocabulary.

    python python/tiny_tokenizer.py vocab.json leap_kernels/models/tiny

`vocab.json` maps words to ids and holds [PAD], [MASK] and [EOS]. Words, single digits and punctuation are tokens, so
that "Ben has 16 books." reads like "Ben has 1 6 books ."; a word outside the vocabulary is an error, never a guess.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = r"####|[A-Za-z]+[0-9]?|[0-9]|[^A-Za-z0-9\s]"


def main(vocabulary: str, folder: str) -> None:
    tokenizer = Tokenizer(WordLevel(json.loads(Path(vocabulary).read_text())))
    tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex(WORDS), "isolated")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        mask_token="[MASK]",
        eos_token="[EOS]",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
