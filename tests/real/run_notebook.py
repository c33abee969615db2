"""Run notebooks with nbclient and save their output: `python run_notebook.py FROM TO`."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

source, target = Path(sys.argv[1]), Path(sys.argv[2])
notebook = nbformat.read(source, as_version=4)
client = NotebookClient(notebook, timeout=900, kernel_name="python3")
client.execute(cwd=str(target.parent))
for cell in notebook.cells:
    cell.metadata.pop("execution", None)  # when it ran
    if cell.cell_type == "code":
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
notebook.metadata.pop("language_info", None)
nbformat.write(notebook, target)
