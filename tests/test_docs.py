# SPDX-License-Identifier: Apache-2.0
"""README and docs are true: their Python runs, their settings exist, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from leap_kernels.models.registry import REGISTRY
from leap_kernels.models.tiny import checks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_in_the_docs_runs(page):
    names: dict = {}
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), names)
    if page.name == "README.md":
        plain = names["stock"](names["ids"], is_causal=False).logits
        assert torch.allclose(names["base"], plain, atol=1e-5)
        assert names["copies"].shape == (int(names["masked"].sum()), 64)
        assert names["copies"].isfinite().all()
        story, function = names["out"].text(names["tokenizer"])
        assert story.endswith("Answer: 20 books.")
        assert checks.code(function) == " ".join(str((x + 3) * 2 - 4) for x in range(1, 10))


def test_the_strategy_of_the_contributing_page_decodes(tiny, tiny_prompts):
    import leap_kernels

    names: dict = {}
    exec(blocks(ROOT / "CONTRIBUTING.md")[0], names)
    prompt = torch.tensor(next(iter(tiny_prompts.values()))[0])
    out = leap_kernels.decode(tiny, prompt, strategy=names["Certain"](0.05))
    assert not (out.generated == 1).any()
    assert out.nfe[0] < 96


def test_every_setting_is_documented():
    from leap_kernels import DecodeConfig
    from leap_kernels.strategies import STRATEGIES

    text = "".join((ROOT / "docs" / name).read_text() for name in ("decoding.md", "leap.md", "strategies.md"))
    for field in dataclasses.fields(DecodeConfig):
        assert f"`{field.name}`" in text
    for name, strategy in STRATEGIES.items():
        assert f"`{name}`" in text
        for field in dataclasses.fields(strategy):
            assert f"`{field.name}`" in text, (name, field.name)


def test_the_models_page_is_what_the_table_says():
    """`python python/models_page.py` would change nothing; and it does change a page that is stale."""
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "python/models_page.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (ROOT / "docs/models.md").read_text()
    assert program.rewritten(page) == page
    assert program.rewritten(page.replace("156895", "156896")) == page
    for entry in REGISTRY.values():
        assert f"`{entry.model_class}`" in page
        assert all(f"`{name}`" in page for name in entry.checkpoints)
        assert not entry.checkpoints or (entry.licence and entry.citation)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
