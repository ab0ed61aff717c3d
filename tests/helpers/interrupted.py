"""Training that is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import train_retrieval


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Ends retrieval training as Ctrl-C does, when it draws the batch after `step` steps."""
    draw = train_retrieval.RetrievalTrainer.draw

    def stop(trainer: Any) -> Any:
        if trainer.step == step:
            raise KeyboardInterrupt
        return draw(trainer)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_retrieval.RetrievalTrainer, "draw", stop)
        yield
