"""Tests of the curves that the training examples write for TensorBoard."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import EXAMPLES


@pytest.mark.faults
@pytest.mark.slow
def test_the_curves_of_tensorboard_say_where_the_disk_is_full(tmp_path: Path) -> None:
    """The error comes from the thread of TensorBoard's writer, and is reported as it is."""
    program = (
        "from pathlib import Path\n"
        "from recommender.scalars import Scalars\n"
        "scalars = Scalars(Path('curves'), 0)\n"
        "for step in range(1000):\n"
        "    scalars.write('train', {'loss': 1.0}, step)\n"
        "scalars.flush()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.endswith("OSError: [Errno 27] File too large: 'curves'\n")
    assert "Exception in thread" not in result.stderr
