# SPDX-License-Identifier: Apache-2.0
"""`load`: a checkpoint as a stock transformers model with a `ModelSpec`. No remote code, no pickle, nothing lenient."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError, LeapError, ModelError, expected
from .files import differences, refuse_broken_index, refuse_own_head, refuse_pickle
from .fused import converting
from .parallel import checked_plan, plan_arguments
from .registry import Entry, entry_for
from .rope import keep_float32
from .spec import ModelSpec

__all__ = ["TINY", "load", "load_tokenizer"]

TESTED_TRANSFORMERS = ("5.0", "5.25")  # oldest and newest release that the tests have run with

TINY = Path(__file__).parent / "tiny"  # the bundled model, named "tiny"


def load(path_or_repo: str | Path, *, dtype: Any = "auto", device: Any = None, tp_plan: Any = None) -> Any:
    """Load a diffusion language model into a stock transformers class.

    Args:
        path_or_repo: folder, Hugging Face repository, or "tiny" for the model inside this package.
        dtype: a torch.dtype or its name. "auto" takes the checkpoint's own, except that half precision becomes
            float32 on a CPU, where it would be slower and less exact.
        device: where the model goes, such as "cuda"; None leaves it on the CPU.
        tp_plan: "auto" splits the layers among the processes that torchrun started, by transformers' plan for the
            class, on the device of each; a dict overrides rules of that plan. Needs accelerate.

    Returns:
        The model in eval mode, with "leap" attention and its ModelSpec as `model.leap_spec`.

    Raises:
        ModelError: an architecture without a registry entry, or one without a mask token.
        CheckpointError: no safetensors file, or a missing, unexpected or misshapen weight.
        ConfigError: an unknown dtype or device, or a tp_plan that cannot be followed here.
    """
    import transformers

    from ..attention import NAME, register

    _warn_untested(transformers.__version__)
    folder = _resolve(path_or_repo)
    target = _device(device)
    own_device = target if tp_plan is None else checked_plan(tp_plan, device)
    with _quiet(transformers), _as_checkpoint_error(f"{path_or_repo} does not load"):
        raw = _config_dict(folder)
        name, entry = entry_for(raw)
        _refuse_quantised(raw)
        if entry.masked_lm and raw.get("mask_token_id") is None:
            raw = raw | _of_tokenizer(folder)
        spec = entry.spec(raw)
        dtype = _dtype(dtype, raw, own_device)
        parallel = plan_arguments(tp_plan, entry)
        refuse_pickle(folder)
        refuse_broken_index(folder)
        register()

        model_class = getattr(transformers, entry.model_class)
        config = model_class.config_class(**entry.config(raw))
        if dtype == torch.float64:
            config._experts_implementation = "eager"  # torch's grouped product does not know this dtype
        try:
            converted = converting(entry.fused, config, split_among_processes=tp_plan is not None)
            with converted, _one_by_one(entry):
                model, info = model_class.from_pretrained(
                    folder,
                    config=config,
                    dtype=dtype,
                    key_mapping=dict(entry.names) or None,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # so that they are listed, and refused, with the others
                    output_loading_info=True,
                    attn_implementation=NAME,
                    **parallel,
                )
        except RuntimeError as error:  # a conversion that failed; transformers does not say where
            problems = differences(folder, entry, model_class, config)
            if not problems:
                raise
            raise CheckpointError(f"{path_or_repo} does not match {name} ({entry.model_class}): {problems}.") from error
        problems = differences(folder, entry, model_class, config)
        problems = problems or {what: sorted(map(str, keys)) for what, keys in info.items() if keys}
        kept = [key for key in problems.get("unexpected_keys", ()) if not _is_unused(key, entry)]
        problems = {what: kept if what == "unexpected_keys" else keys for what, keys in problems.items()}
        problems = {what: keys for what, keys in problems.items() if keys}
        if problems:
            raise CheckpointError(f"{path_or_repo} does not match {name} ({entry.model_class}): {problems}.")
        if model.config.tie_word_embeddings and model.get_output_embeddings() is not None:
            refuse_own_head(folder, model, entry)
    # The model is a stock one from here on: saved under stock names, beside the stock config.
    model.__dict__.pop("_weight_conversions", None)
    if spec.rope_fp32:
        keep_float32(model)
    model.leap_spec = spec
    return model.to(target).eval() if target is not None else model.eval()


def load_tokenizer(path_or_repo: str | Path) -> Any:
    """The tokenizer of a checkpoint, chat template included, padding on the left.

    `decode(model, **tokenizer(texts, padding=True, return_tensors="pt"))` then works as it stands. Raises
    CheckpointError when the folder or repository holds no tokenizer.
    """
    import transformers

    folder = _resolve(path_or_repo)
    with _quiet(transformers), _as_checkpoint_error(f"no tokenizer in {path_or_repo}"):
        # AutoTokenizer would look for a model type that transformers does not know.
        own = Path(folder, "tokenizer.json").is_file()
        kind = transformers.PreTrainedTokenizerFast if own else transformers.AutoTokenizer
        tokenizer = kind.from_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _of_tokenizer(folder: str) -> dict[str, int]:
    """The mask id of the tokenizer.json beside a checkpoint, where there is one that has a mask token."""
    import transformers

    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception:
        return {}
    words = tokenizer.get_vocab()
    found = next((words[name] for name in (tokenizer.mask_token, "[MASK]", "<mask>") if name in words), None)
    return {} if found is None else {"mask_token_id": int(found)}


def _is_unused(key: str, entry: Entry) -> bool:
    return any(re.search(pattern, key) for pattern in entry.unused)


def spec_of(model: Any) -> ModelSpec | None:
    """The ModelSpec of a model: what `load` attached, or what the registry reads from its config; None if neither."""
    attached = getattr(model, "leap_spec", None) or getattr(model, "spec", None)
    if isinstance(attached, ModelSpec):
        return attached
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    raw = {k: v for k, v in config.to_dict().items() if v is not None} | {"architectures": [type(model).__name__]}
    try:
        return entry_for(raw)[1].spec(raw)
    except (ModelError, KeyError):
        return None


@functools.cache
def _warn_untested(version: str) -> None:
    """One warning, never a refusal, where transformers is newer than what the tests have seen."""
    oldest, newest = TESTED_TRANSFORMERS
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) > tuple(map(int, newest.split("."))):
        warnings.warn(
            f"transformers {version} is newer than what leap_kernels is tested with ({oldest} to {newest}); "
            "if results look wrong, compare with a tested release.",
            stacklevel=3,
        )


def _resolve(path_or_repo: str | Path) -> str:
    """A folder that is there, or the name of a repository; CheckpointError for what can be neither."""
    name = str(path_or_repo)
    if name == "tiny":
        return str(TINY)
    repository = isinstance(path_or_repo, str) and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not repository and not Path(name).is_dir():
        raise CheckpointError(
            f'no folder {name}, so no config.json. The bundled model is "tiny", a repository is "owner/name".'
        )
    return name


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is the checkpoint's fault; errors of ours already say so."""
    try:
        yield
    except LeapError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{what}: its config.json has no {error}.") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {error}") from error


def _config_dict(folder: str) -> dict[str, Any]:
    from transformers import PretrainedConfig

    if Path(folder).is_dir() and not Path(folder, "config.json").is_file():
        raise CheckpointError(f'no config.json in {folder}. Pass a checkpoint folder, a repository, or "tiny".')
    try:
        raw: dict[str, Any] = PretrainedConfig.get_config_dict(folder)[0]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no readable config.json in {folder}: {error}") from error
    return raw


def _refuse_quantised(raw: dict[str, Any]) -> None:
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", quantised) if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"config.json declares quantised weights ({method}), which load does not read. Load the checkpoint they "
            "were made from and quantise that model, or let transformers quantise load(path).save_pretrained(folder) "
            "(docs/swap.md)."
        )


def _device(device: Any) -> torch.device | None:
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device  # also finds out whether it is there
    except Exception as error:
        raise ConfigError(expected("device", "a torch device that is here", f"{device!r} ({error})")) from error


def _dtype(dtype: Any, raw: dict[str, Any], device: torch.device | None) -> torch.dtype:
    own = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, own if dtype == "auto" else str(dtype), None)
    if resolved not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ConfigError(expected("dtype", '"auto" or a floating-point torch dtype of 16 bits or more', repr(dtype)))
    if dtype == "auto" and (device is None or device.type == "cpu") and resolved.itemsize < 4:
        return torch.float32
    return resolved


@contextlib.contextmanager
def _one_by_one(entry: Entry) -> Iterator[None]:
    """Read weights when they are needed, where transformers would read all ahead: of those it merges or splits, which
    are then new tensors, there would be two copies if they change their dtype as well."""
    if not entry.fused and "Moe" not in entry.model_class:
        yield
        return
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(switch, None)
        else:
            os.environ[switch] = before


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bar and no warning table while loading: what is wrong is raised instead."""
    log = transformers.utils.logging
    level, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()
