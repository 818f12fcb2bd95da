# SPDX-License-Identifier: Apache-2.0
"""Fill masked antibody chains with AntiBERTy, by threshold and by LEAP: forwards, rows computed, residues recovered.

    pip install --no-deps antiberty==0.1.3     # 26 M parameters in the wheel (MIT); none of its code is run
    python python/examples/fill_antibodies.py

AntiBERTy (Ruffolo et al., arXiv:2112.07782) is a BERT with 8 layers and 25 tokens, so its weights fit transformers'
own `BertForMaskedLM`. Four variable domains of published therapeutic antibodies are masked at random and filled in.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import random
import sys
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

import leap_kernels

CHAINS = {
    "trastuzumab, heavy": "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY"
    "ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "trastuzumab, light": "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPS"
    "RFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "adalimumab, heavy": "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDY"
    "ADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "adalimumab, light": "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPS"
    "RFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one by one": {"strategy": "full"},
    "threshold 0.9": {"strategy": "threshold", "threshold": 0.9},
    "threshold 0.7": {"strategy": "threshold", "threshold": 0.7},
    "leap": {"strategy": "leap"},
}


def installed() -> pathlib.Path:
    """Where the wheel keeps its models."""
    found = importlib.util.find_spec("antiberty")
    if found is None or not found.submodule_search_locations:
        sys.exit("antiberty is not installed: pip install --no-deps antiberty==0.1.3")
    return pathlib.Path(found.submodule_search_locations[0]) / "trained_models"


def load(folder: pathlib.Path) -> tuple[Any, list[str], leap_kernels.ModelSpec]:
    """The model as transformers' own class, its 25 tokens, and what decoding must know."""
    saved = json.loads((folder / "AntiBERTy_md_smooth/config.json").read_text())
    known = set(BertConfig().to_dict()) - {"architectures", "model_type", "transformers_version", "dtype"}
    model = BertForMaskedLM(BertConfig(**{key: value for key, value in saved.items() if key in known})).eval()
    # The wheel has a pickle file; weights_only reads tensors from it and runs nothing.
    weights = torch.load(folder / "AntiBERTy_md_smooth/pytorch_model.bin", map_location="cpu", weights_only=True)
    missing, _ = model.load_state_dict(weights, strict=False)  # what is left over are its heads for species and chain
    if missing:
        sys.exit(f"these weights are not AntiBERTy's: {', '.join(missing)} are missing")
    words = (folder / "vocab.txt").read_text().split()
    spec = leap_kernels.ModelSpec(mask_token_id=words.index("[MASK]"), pad_token_id=words.index("[PAD]"))
    return model, words, spec


def masked_chains(
    words: list[str], share: float, seed: int, mask: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each chain between [CLS] and [SEP], as it is and with `share` of its residues masked."""
    rng = random.Random(seed)
    whole, gapped = [], []
    for chain in CHAINS.values():
        ids = torch.tensor([words.index("[CLS]"), *(words.index(residue) for residue in chain), words.index("[SEP]")])
        hidden = sorted(rng.sample(range(1, len(chain) + 1), round(share * len(chain))))
        whole.append(ids)
        gapped.append(ids.index_fill(0, torch.tensor(hidden), mask))
    return whole, gapped


def fill(folder: pathlib.Path, shares: list[float], seeds: int) -> list[dict[str, Any]]:
    """One row a share of masks and strategy: means over chains and masks."""
    model, words, spec = load(folder)
    special = [i for i, word in enumerate(words) if word.startswith("[") and i != spec.mask_token_id]
    rows = []
    for share in shares:
        for name, options in STRATEGIES.items():
            forwards, computed, right, total = 0, 0, 0, 0
            for seed in range(seeds):
                whole, gapped = masked_chains(words, share, seed, spec.mask_token_id)
                out = leap_kernels.decode(model, gapped, spec=spec, infill=True, suppress_tokens=special, **options)
                forwards += int(out.nfe.sum())
                computed += int(out.token_forwards.sum())
                for truth, given, filled in zip(whole, gapped, out.sequences, strict=True):
                    gaps = given == spec.mask_token_id
                    right += int((filled[-len(truth) :][gaps] == truth[gaps]).sum())
                    total += int(gaps.sum())
            texts = len(CHAINS) * seeds
            rows.append(
                {"masked": share, "strategy": name, "forwards": forwards / texts, "rows": computed / texts}
                | {"residues a forward": total / forwards, "recovered": right / total, "of": total}
            )
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Fill masked antibody chains by threshold and by LEAP.")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="antiberty's trained_models; the installed wheel's if left out"
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="shares of residues to mask")
    parser.add_argument("--seeds", type=int, default=3, help="random masks of every chain")
    options = parser.parse_args(arguments)
    rows = fill(options.folder or installed(), options.shares, options.seeds)
    print("| masked | strategy | forwards | rows computed | residues a forward | recovered |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['masked']:.0%} | {row['strategy']} | {row['forwards']:.2f} | {row['rows']:.0f} | "
            f"{row['residues a forward']:.2f} | {row['recovered']:.1%} of {row['of']} |"
        )
    return rows


if __name__ == "__main__":
    main()
