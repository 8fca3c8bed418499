"""The notebooks run from the first cell to the last."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra 'dev'")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra 'dev'")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # figures then show in the notebook
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
