# SPDX-License-Identifier: Apache-2.0
"""ESM's embeddings. With `token_dropout` masks have none, and the others are scaled by the share of masks there are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import BASE
from ..rows import Rows

__all__ = ["base_scaled_embeddings"]

MASKED_IN_TRAINING = 0.15 * 0.8  # the share of mask tokens that every ESM model was trained with


def base_scaled_embeddings(body: Any, token: Tensor, rows: Rows) -> Tensor:
    """(B, R, D): the model's own embeddings, where only base rows count for the share of masks.

    Copies are masks too: if they counted, appending them would change every base row.
    """
    own = body.embeddings
    x: Tensor = own.word_embeddings(token)
    if own.token_dropout:
        masked, base = token == own.mask_token_id, rows.kind == BASE
        share = (masked & base).sum(1).float() / base.sum(1)
        scale = (1 - MASKED_IN_TRAINING) / (1 - share)
        x = (x.masked_fill(masked[..., None], 0) * scale[:, None, None]).to(x.dtype)
    if own.position_embedding_type == "absolute":
        x = x + own.position_embeddings(rows.pos.long())
    return x if own.layer_norm is None else own.layer_norm(x)
