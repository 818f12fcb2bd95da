# SPDX-License-Identifier: Apache-2.0
"""Write the bundled model's word-level tokenizer: the vocabulary of data.py, text that reads like text.

    python python/train_tiny/tokenizer.py FOLDER

Words, numbers up to 99, JSON keys with their quotes, punctuation, and line breaks with or without an indent are
tokens. Text is written without the spaces that nobody would write, and encoding it gives the same tokens again. A word
outside the vocabulary is an error, never a guess.
"""

from __future__ import annotations

import sys

from data import INDENT, vocabulary
from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split
from transformers import PreTrainedTokenizerFast

TOKEN = r'\n    |\n|"[a-z]+":|->|==|[A-Za-z]+|[0-9]+|\S'


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer in transformers' form; it pads on the left."""
    made = Tokenizer(WordLevel(vocabulary()))
    # Any indent is the one there is, and white space elsewhere says nothing.
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"[ \t]*\n[ \t]+"), INDENT),
            normalizers.Replace(Regex(r"[ \t]+\n"), "\n"),
            normalizers.Strip(),
        ]
    )
    made.pre_tokenizer = Sequence([Split(Regex(TOKEN), "removed", invert=True)])
    made.decoder = decoders.Sequence(
        [
            decoders.WordPiece("[nothing begins like this]", cleanup=False),  # joins with spaces
            decoders.Fuse(),
            decoders.Replace(Regex(r" (?=[.,:?)\]}\n])"), ""),
            decoders.Replace(Regex(r"(?<=[(\[{]) "), ""),
            decoders.Replace(Regex(r"(?<=f) (?=\()"), ""),
            decoders.Replace(Regex(r'(?<=": ") | (?=",)'), ""),
            decoders.Replace(Regex(r"(?<=\n    ) "), ""),
            decoders.Replace(Regex(r"(?<=\n) (?=\S)"), ""),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        mask_token="[MASK]",
        eos_token="[EOS]",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


if __name__ == "__main__":
    tokenizer().save_pretrained(sys.argv[1])
