# SPDX-License-Identifier: Apache-2.0
"""Masks inside a text: masked language models of transformers, and infilling with every model, against slow truth."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
import transformers
from checkpoints import edit_config, rewrite_weights, stored_weights
from families import FAMILIES, MASKED_LMS, write
from oracle import OracleResult, decode_one
from plain import Plain
from random_models import SPEC, plain_forward, random_llama
from torch import Tensor

import leap_kernels
from leap_kernels import ModelSpec, Rows, decode, ops
from leap_kernels.errors import CheckpointError, ConfigError, InputError, ModelError
from leap_kernels.models.backbone import backbone_for
from leap_kernels.strategies import STRATEGIES
from leap_kernels.strategies.base import NEW_TOKENS, NO_SHIFT

LIMIT = 1e-5
MASK = 43

# What a checkpoint of each family may differ in.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BERT", {}),
    "BERT-sharded-bfloat16": ("BERT", {"shards": 3, "torch_dtype": "bfloat16"}),
    "RoBERTa": ("RoBERTa", {}),
    "RoBERTa-sharded": ("RoBERTa", {"shards": 3, "pad_token_id": 3}),
    "ModernBERT": ("ModernBERT", {}),
    "ModernBERT-bfloat16": ("ModernBERT", {"torch_dtype": "bfloat16", "local_attention": 4, "shards": 2}),
    "ESM": ("ESM", {}),
    "ESM-sharded-bfloat16": ("ESM", {"shards": 3, "torch_dtype": "bfloat16"}),
    "ESM-absolute": ("ESM", {"position_embedding_type": "absolute", "emb_layer_norm_before": True}),
    "ESM-without-token-dropout": ("ESM", {"token_dropout": False}),
}


class Case(NamedTuple):
    family: str
    folder: Path
    model: Any
    plain: Plain
    offset: int


@pytest.fixture(params=VARIANTS, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, changes = VARIANTS[request.param]
    folder = write(tmp_path_factory.mktemp("case"), family, seed=len(request.param), **changes)
    learned = family == "RoBERTa" or "absolute" in request.param
    offset = (changes.get("pad_token_id", 1) + 1) if learned else 0
    plain = Plain.from_folder(folder, torch.float64)
    return Case(family, folder, leap_kernels.load(folder), plain, offset)


def texts(seed: int = 0, batch: int = 3, length: int = 17, share: float = 0.5) -> Tensor:
    """Ids between two tokens that are never masked, `share` of the others masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 40, (batch, length), generator=generator)
    masked = torch.rand((batch, length), generator=generator) < share
    masked[:, [0, -1]] = False
    return ids.masked_fill(masked, MASK)


def near(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max().item() <= LIMIT
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def same(out: Any, oracle: OracleResult, sample: int, at: slice = slice(None)) -> None:
    assert out.sequences[sample, at].tolist() == oracle.tokens
    assert out.nfe[sample].item() == oracle.nfe
    assert out.token_forwards[sample].item() == oracle.token_forwards
    assert out.history.step[sample, at].tolist() == oracle.steps
    assert out.new_tokens[sample].item() == sum(step > 0 for step in oracle.steps)


# --- masked language models ----------------------------------------------------------------------------------------


def test_the_loaded_model_has_the_logits_of_the_plain_implementation(case: Case) -> None:
    """transformers' own forward of what was loaded, and ours with rows.

    In float64: how much float32 rounds depends on the CPU.
    """
    model = leap_kernels.load(case.folder, dtype="float64")
    ids = texts(1)
    truth = case.plain(ids, torch.arange(17).expand(3, 17))
    rows = Rows.plain(ids, model.leap_spec)
    with torch.inference_mode(), backbone_for(model, model.leap_spec) as backbone:
        near(model(ids, attention_mask=torch.ones_like(ids)).logits, truth)
        near(backbone.head(backbone.body(rows)), truth)


def test_appended_rows_see_the_right_rows_and_change_no_base_row(case: Case) -> None:
    """Repeated positions, restricted visibility, windows, and a share of masks that must not count the copies.

    In float64: a row that sees little sharpens what float32 rounds.
    """
    model = leap_kernels.load(case.folder, dtype="float64")
    ids = texts(2)
    masked = ids == MASK
    positions = torch.arange(17).expand(3, 17)
    before = case.plain(ids, positions)
    candidates = ops.top_eta(before[masked].float(), 0.02, suppress=[MASK])
    assert (candidates.counts > 0).any()
    rows = Rows.superpose(ids, masked, candidates, model.leap_spec)
    with torch.inference_mode(), backbone_for(model, model.leap_spec) as backbone:
        logits = backbone.head(backbone.body(rows))
    kept = rows.kind >= 0
    # The plain implementation looks up rows of its position table on its own, so it counts from 0.
    window = rows.unwindowed.dense_mask
    truth = case.plain(rows.token, rows.pos.long() - case.offset, window)
    near(logits[kept], truth[kept])
    near(logits[:, :17], before)


def test_masked_lms_are_saved_and_loaded_again(case: Case, tmp_path: Path) -> None:
    case.model.save_pretrained(tmp_path)
    again = leap_kernels.load(tmp_path)
    ids = texts(3)
    with torch.inference_mode():
        valid = torch.ones_like(ids)
        assert torch.equal(again(ids, attention_mask=valid).logits, case.model(ids, attention_mask=valid).logits)
    assert again.leap_spec == case.model.leap_spec


def test_specs_of_masked_lms(case: Case) -> None:
    spec = case.model.leap_spec
    assert spec.mask_token_id == MASK
    assert spec.position_offset == case.offset
    raw = json.loads((case.folder / "config.json").read_text())
    assert spec.max_positions == raw["max_position_embeddings"] - case.offset
    assert spec.window == (raw["local_attention"] // 2 + 1 if case.family == "ModernBERT" else 0)
    assert spec.defaults == {"infill": True}


@pytest.mark.parametrize("run_length", [None, 5])
def test_masked_lms_fill_what_the_slow_decoder_fills(case: Case, run_length: int | None) -> None:
    """Dense masks, the plain forward, lists of numbers; ragged texts, padded on either side."""
    options: dict[str, Any] = {"threshold": 0.5, "tau": 0.1, "eta": 0.05}
    ids = texts(4)
    lengths = [17, 11, 14]
    valid = torch.arange(17) < torch.tensor(lengths)[:, None]
    ours = options if run_length is None else {**options, "block_length": run_length}
    right = decode(case.model, ids, valid.long(), **ours)
    flipped = torch.stack([row.roll(17 - n) for row, n in zip(ids, lengths, strict=True)])
    left = decode(case.model, flipped, torch.arange(17) >= 17 - torch.tensor(lengths)[:, None], **ours)
    for i, length in enumerate(lengths):
        oracle = decode_one(
            case.plain, ids[i, :length].tolist(), mask_id=MASK, infill=True, block_length=run_length, **options
        )
        same(right, oracle, i, slice(0, length))
        same(left, oracle, i, slice(17 - length, 17))
        assert torch.equal(right.sequences[i, length:], ids[i, length:])
        assert torch.equal(left.sequences[i, : 17 - length], flipped[i, : 17 - length])
    assert (right.history.reason == 2).any(), "no token converged: the example shows nothing of LEAP"


@pytest.mark.parametrize("changes", [{}, {"pad_token_id": 3}])
def test_roberta_cannot_use_the_positions_below_its_offset(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Texts as long as the position table has room for behind the offset, and one longer."""
    model = leap_kernels.load(write(tmp_path, "RoBERTa", **changes))
    most = 66 - changes.get("pad_token_id", 1) - 1
    assert (decode(model, torch.full((1, most), MASK)).sequences != MASK).all()
    with pytest.raises(InputError, match=f"sample 0 needs {most + 1} positions, the model has {most}. Shorten it"):
        decode(model, torch.full((1, most + 1), MASK))
    bare = ModelSpec(mask_token_id=MASK, position_offset=model.leap_spec.position_offset)
    with pytest.raises(InputError, match=f"the model has {most}"):
        decode(model, torch.full((1, most + 1), MASK), spec=bare, infill=True)


def test_published_ids_of_masked_lms() -> None:
    """Where config.json names no mask token and the vocabulary is a published one."""
    from leap_kernels.models.registry import entry_for

    for family, width, mask in [
        ("BERT", 30522, 103), ("BERT", 28996, 103), ("RoBERTa", 50265, 50264), ("ModernBERT", 50368, 50284),
        ("ESM", 33, 32),
    ]:  # fmt: skip
        raw = {**MASKED_LMS[family], "vocab_size": width, "mask_token_id": None}
        raw |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 1}
        assert entry_for(raw)[1].spec(raw).mask_token_id == mask


def test_a_masked_lm_takes_its_mask_token_from_its_tokenizer(tmp_path: Path) -> None:
    """BERT's config.json names none, and vocabularies of one's own are common."""
    folder = write(tmp_path, "BERT")
    edit_config(folder, mask_token_id=...)
    with pytest.raises(ModelError, match="declares no mask_token_id"):
        leap_kernels.load(folder)
    for number, name in enumerate(("[MASK]", "<mask>", "@")):
        words = {**{f"w{i}": i for i in range(43)}, name: 43 + number}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
            **({"mask_token": name} if name == "@" else {}),
        )
        tokenizer.save_pretrained(folder)
        assert leap_kernels.load(folder).leap_spec.mask_token_id == 43 + number


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("BERT", {"is_decoder": True}),
        ("BERT", {"position_embedding_type": "relative_key"}),
        ("RoBERTa", {"add_cross_attention": True}),
        ("ESM", {"is_folding_model": True}),
    ],
    ids=str,
)
def test_masked_lms_of_another_kind_are_refused(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"is not \w+-shaped"):
        leap_kernels.load(write(tmp_path, family, **changes))


@pytest.mark.parametrize("family", MASKED_LMS)
def test_broken_masked_lms_are_refused(tmp_path: Path, family: str) -> None:
    """Missing, foreign and misshapen weights, although published files hold some that are of no use."""
    for number, change in enumerate(("missing", "foreign", "misshapen")):
        folder = write(tmp_path / str(number), family)
        name = next(n for n in stored_weights(folder) if n.endswith(("intermediate.dense.weight", "mlp.Wi.weight")))
        changed: dict[str, Tensor | None] = {
            "missing": {name: None}, "foreign": {name + "_g": torch.zeros(2)}, "misshapen": {name: torch.zeros(7, 32)},
        }[change]  # fmt: skip
        rewrite_weights(folder / "model.safetensors", changed)
        with pytest.raises(CheckpointError, match=name.rsplit(".", 2)[-2]):
            leap_kernels.load(folder)


def test_a_head_of_its_own_contradicts_tied_embeddings(tmp_path: Path) -> None:
    folder = write(tmp_path, "RoBERTa")
    rewrite_weights(folder / "model.safetensors", {"lm_head.decoder.weight": torch.zeros(48, 32)})
    with pytest.raises(CheckpointError, match=r"ties lm_head.decoder.weight to the embeddings"):
        leap_kernels.load(folder)


def test_a_live_masked_lm_fills_with_a_spec() -> None:
    """A model that transformers itself loaded; its own ModelSpec comes from its config when that names the mask."""
    config = transformers.BertConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    ids = texts(5)
    with pytest.raises(ModelError, match="no mask token known for BertForMaskedLM"):
        decode(model, ids)
    out = decode(model, ids, spec=ModelSpec(mask_token_id=MASK), infill=True)
    model.config.mask_token_id = MASK
    assert torch.equal(decode(model, ids).sequences, out.sequences)
    assert not (out.sequences == MASK).any()


def test_rounded_tables_of_modernbert_are_repaired(tmp_path: Path) -> None:
    """It has a table of frequencies for each kind of layer."""
    model = leap_kernels.load(write(tmp_path, "ModernBERT"))
    names = ("full_attention_inv_freq", "sliding_attention_inv_freq")
    exact = [getattr(model.model.rotary_emb, name).clone() for name in names]
    model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="inv_freq is torch.bfloat16"):
        decode(model, texts(6))
    for name, table in zip(names, exact, strict=True):
        assert torch.equal(getattr(model.model.rotary_emb, name), table)


# --- every other model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("run_length", [None, 2, 4])
def test_dllms_fill_what_the_slow_decoder_fills(tmp_path: Path, family: str, run_length: int | None) -> None:
    """Shifted, block-causal and full: masks of the prompt itself."""
    folder = write(tmp_path, family)
    model, plain = leap_kernels.load(folder), Plain.from_folder(folder, torch.float64)
    spec = model.leap_spec
    options: dict[str, Any] = {"threshold": 0.4, "tau": 0.06, "eta": 0.05}
    prompts = [row[:n] for row, n in zip(texts(7, share=0.6), (17, 5, 12), strict=True)]
    expected = run_length or spec.defaults.get("block_length")
    ours = options if run_length is None else {**options, "block_length": run_length}
    out = decode(model, prompts, infill=True, **ours)
    for i, prompt in enumerate(prompts):
        oracle = decode_one(
            plain, prompt.tolist(), mask_id=MASK, infill=True, block_length=expected, shift=spec.shift,
            block_causal=spec.block_causal_length, free_first_token=family == "Fast-dLLM", **options,
        )  # fmt: skip
        same(out, oracle, i, slice(17 - len(prompt), 17))


def check_random_case(seed: int) -> set[Any]:
    """Random settings, models and masks in float64: the oracle's tokens, steps and counters."""
    rng = random.Random(seed)
    block_causal = rng.choice([0, 0, 0, 4, 8])
    run_length = rng.choice([None, *([1, 2, 4] if block_causal == 4 else [2, 8] if block_causal else [1, 3, 7])])
    spec = ModelSpec(
        mask_token_id=0, eos_token_ids=(1, 5), pad_token_id=rng.choice([None, 2]), shift=rng.choice([0, 1]),
        block_causal_length=block_causal, vocab_size=23,
    )  # fmt: skip
    options: dict[str, Any] = {
        "strategy": rng.choice(["leap", "leap", "leap", "threshold", "full"]),
        "threshold": rng.choice([0.5, 0.9]), "tau": rng.choice([0.0, 0.3]), "eta": rng.choice([0.05, 0.2]),
        "copies_see_copies": rng.random() < 0.6, "candidates_see_candidates": rng.random() < 0.6,
    }  # fmt: skip
    share = rng.choice([0.1, 0.5, 0.9])
    prompts = [[0 if rng.random() < share else rng.randint(1, 22) for _ in range(rng.randint(1, 20))] for _ in range(4)]
    prompts[0][-1] = 0
    kept = ("strategy", "threshold") if options["strategy"] == "threshold" else ("strategy",)
    ours = options if options["strategy"] == "leap" else {name: options[name] for name in kept}
    if run_length is not None:
        ours = {**ours, "block_length": run_length}
    model = random_llama(seed, kv_heads=2, sharpness=3.0 if options["strategy"] == "full" else 8.0)
    out = decode(model, [torch.tensor(p) for p in prompts], spec=spec, infill=True, **ours)
    width = max(map(len, prompts))
    for i, prompt in enumerate(prompts):
        oracle = decode_one(
            plain_forward(model), prompt, mask_id=0, infill=True, block_length=run_length, shift=spec.shift,
            block_causal=block_causal, **options,
        )  # fmt: skip
        same(out, oracle, i, slice(width - len(prompt), width))
    return {
        ("run", run_length),
        ("blocks", block_causal),
        ("shift", spec.shift),
        *out.history.reason.flatten().tolist(),
    }


def test_random_texts_are_filled_as_by_the_oracle() -> None:
    seen: set[Any] = set()
    for seed in range(40):
        seen |= check_random_case(seed)
    runs = {("run", length) for length in (None, 1, 3, 7)}
    assert runs | {("blocks", 0), ("blocks", 4), ("shift", 1), 0, 1, 2, 3} <= seen


@pytest.mark.slow
def test_hundreds_of_random_texts() -> None:
    for seed in range(1000, 1400):
        check_random_case(seed)


# --- what comes out, and what is refused ---------------------------------------------------------------------------

MODEL_SPEC = ModelSpec(mask_token_id=0, eos_token_ids=(1,), pad_token_id=2, vocab_size=23)


def test_everything_but_the_masks_is_as_given() -> None:
    """EOS and padding inside a text end nothing; a text without masks takes part in no forward."""
    model = random_llama(3)
    ids = torch.tensor([[5, 1, 0, 7, 1, 0, 9, 2], [3, 4, 5, 6, 7, 8, 9, 10]])
    out = decode(model, ids, spec=MODEL_SPEC, infill=True)
    given = ids != 0
    assert torch.equal(out.sequences[given], ids[given])
    assert not (out.sequences == 0).any()
    assert torch.equal(out.generated, out.sequences)
    assert out.prompt_length == 0
    assert out.new_tokens.tolist() == [2, 0]
    assert (out.nfe[0] > 0, out.nfe[1], out.token_forwards[1], out.tokens_per_forward[1]) == (True, 0, 0, 0.0)
    assert ((out.history.step > 0) == ~given).all()
    assert ((out.history.confidence > 0) == ~given).all()


def test_observers_see_the_callers_columns() -> None:
    """Also where padding stands on the right, which is moved inside."""
    ids = torch.tensor([[5, 0, 0, 7, 9, 9], [3, 0, 5, 6, 0, 8]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    events: list[Any] = []
    out = decode(random_llama(4), ids, mask, spec=MODEL_SPEC, infill=True, observers=[events.append])
    seen = {(s, i): (e.step, t) for e in events for s, i, t in zip(e.sample, e.index, e.token, strict=True)}
    assert seen.keys() == {(0, 1), (0, 2), (1, 1), (1, 4)}
    for (sample, index), (step, token) in seen.items():
        assert out.history.step[sample, index] == step
        assert out.sequences[sample, index] == token


def test_a_filled_text_is_printed_whole(tiny: Any, tiny_tokenizer: Any) -> None:
    text = "Ben has 16 books. He buys 7. He sells 3. How many books does Ben have?"
    ids = tiny_tokenizer(text, return_tensors="pt")["input_ids"]
    ids[0, 3] = tiny.leap_spec.mask_token_id
    out = decode(tiny, ids, infill=True)
    words = out.text(tiny_tokenizer)[0]
    assert words.startswith("Ben has 16")
    assert words.endswith("have?")


def test_the_same_text_on_either_side_of_its_padding() -> None:
    """Exactly, in float64: tokens, steps, counters do not depend on neighbours or padding."""
    model = random_llama(5)
    ids = torch.tensor([5, 0, 6, 0, 0, 7, 0, 8])
    alone = decode(model, ids, spec=SPEC, infill=True, block_length=3)
    right = torch.tensor([[*ids.tolist(), 9, 9], [0] * 10])
    mask = torch.tensor([[1] * 8 + [0] * 2, [1] * 10])
    padded = decode(model, right, mask, spec=SPEC, infill=True, block_length=3)
    assert torch.equal(padded.sequences[0, :8], alone.sequences[0])
    assert torch.equal(padded.history.step[0, :8], alone.history.step[0])
    assert (padded.nfe[0], padded.token_forwards[0]) == (alone.nfe[0], alone.token_forwards[0])


def test_callables_fill_too() -> None:
    model = random_llama(6)
    ids = torch.tensor([[5, 0, 6, 0, 0, 7]])
    a, b = (decode(m, ids, spec=SPEC, infill=True) for m in (model, lambda input_ids, position_ids, attention_mask:
            plain_forward(model)(input_ids, position_ids, attention_mask)))  # fmt: skip
    assert torch.equal(a.sequences, b.sequences)


CACHES: dict[str, dict[str, Any]] = {
    "none": {}, "prefix": {}, "prefix, refreshed": {"cache_refresh": 2}, "dual": {}, "delayed": {}, "block": {},
}  # fmt: skip
RULES = [name for name, rule in STRATEGIES.items() if NEW_TOKENS not in rule.needs]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("strategy", RULES)
def test_masks_behind_a_text_are_filled_as_new_tokens_are_generated(strategy: str, cache: str, shift: int) -> None:
    """A ragged batch, by every rule with every cache: tokens, steps, counters."""
    block_causal = 4 if cache == "block" else 0
    shift = 0 if NO_SHIFT in STRATEGIES[strategy].needs else shift
    spec = dataclasses.replace(SPEC, shift=shift, block_causal_length=block_causal)
    model = random_llama(8, sharpness=3.0)
    prompts = [torch.tensor(p) for p in ([5, 9, 7], [4, 3, 8, 6, 11, 12, 7])]
    options = {
        "spec": spec, "strategy": strategy, "block_length": 4, "cache": cache.split(",")[0], **CACHES[cache]
    }  # fmt: skip
    out = decode(model, prompts, max_new_tokens=10, early_stop=False, **options)
    filled = decode(model, [torch.cat([p, torch.zeros(10).long()]) for p in prompts], infill=True, **options)
    assert torch.equal(filled.sequences, out.sequences)
    assert torch.equal(filled.history.step[:, -10:], out.history.step)
    assert torch.equal(filled.nfe, out.nfe)
    assert torch.equal(filled.token_forwards, out.token_forwards)
    assert torch.equal(filled.max_new_tokens, out.max_new_tokens)
    assert out.nfe.max() > 3


@pytest.mark.parametrize("strategy", ["leap", "klass"])
def test_rows_of_given_tokens_are_not_read(strategy: str) -> None:
    """cache="delayed" does not compute them in the forward that looks into the next block."""
    model = random_llama(5, sharpness=6.0)
    for ids in ([3, 4, 0, 0, 0, 0, 5, 6, 7, 0, 0, 5, 6, 7], [0] * 8 + [4] * 3 + [0, 4, 4, 4]):
        out = decode(
            model, torch.tensor([ids]), spec=SPEC, infill=True, block_length=4, strategy=strategy, cache="delayed"
        )
        assert not (out.sequences == 0).any()


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in RULES])
def test_rules_for_new_tokens_do_not_fill(strategy: str) -> None:
    with pytest.raises(ConfigError, match="decodes what is behind the prompt"):
        decode(random_llama(), torch.tensor([[5, 0]]), spec=SPEC, infill=True, strategy=strategy)


def test_a_masked_lm_has_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="masked language models recompute every row"):
        decode(leap_kernels.load(write(tmp_path, "ESM")), texts(), cache="dual")


def test_a_streamer_gets_the_whole_text() -> None:
    """From the left, as soon as no mask is left before it; the prompt with its masks is not put."""
    puts: list[list[int]] = []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            puts.append(tokens.flatten().tolist())

        def end(self) -> None:
            puts.append([-1])

    ids = torch.tensor([[5, 1, 0, 7, 0, 0, 9]])
    out = decode(random_llama(3), ids, spec=SPEC, infill=True, strategy="full", streamer=Streamer())
    assert puts[0] == []
    assert puts[-1] == [-1]
    assert len(puts) > 3
    assert [token for put in puts[:-1] for token in put] == out.sequences[0].tolist()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"config": leap_kernels.DecodeConfig(max_new_tokens=8, infill=True)}, ConfigError, "does not go with infill"),
        ({"max_new_tokens": 8}, ConfigError, "max_new_tokens does not go with infill=True"),
        ({"infill": "yes"}, ConfigError, "infill must be True or False"),
        ({"block_length": 0}, ConfigError, "block_length must be a whole number"),
    ],
)
def test_settings_that_do_not_go_with_infilling(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        decode(random_llama(), torch.tensor([[5, 0]]), spec=SPEC, **{"infill": True, **options})


def test_a_text_without_masks_is_refused_when_there_is_no_other() -> None:
    with pytest.raises(InputError, match="no prompt holds the mask token 0: there is nothing to fill"):
        decode(random_llama(), torch.tensor([[5, 6]]), spec=SPEC, infill=True)
    with pytest.raises(InputError, match="nothing to fill"):
        decode(random_llama(), torch.zeros(1, 0, dtype=torch.int64), spec=SPEC, infill=True)


def test_a_masked_lm_generates_only_when_told_not_to_fill(tmp_path: Path) -> None:
    model = leap_kernels.load(write(tmp_path, "BERT"))
    with pytest.raises(ConfigError, match="max_new_tokens does not go with infill=True"):
        decode(model, torch.tensor([[5, 6]]), max_new_tokens=4)
    out = decode(model, torch.tensor([[5, 6]]), max_new_tokens=4, infill=False)
    assert out.sequences.shape == (1, 6)
    assert not (out.sequences == MASK).any()


def test_position_offsets_go_with_plain_models_only() -> None:
    for options in ({"shift": 1}, {"block_causal_length": 4}):
        with pytest.raises(ModelError, match="position_offset goes with neither"):
            ModelSpec(mask_token_id=0, position_offset=2, **options)
    for name in ("position_offset", "window"):
        with pytest.raises(ModelError, match=f"{name} must be at least 0"):
            ModelSpec(mask_token_id=0, **{name: -1})
