"""`dubito`: one page of help, and the commands of the packages that are there."""

import argparse
import re
import subprocess
import sys
from importlib.metadata import EntryPoints

import pytest

import model_store.__main__
import service.__main__
import training.__main__
from dubito import command
from dubito.command import GROUP, main
from tests.support.entry_points import entry_points
from tests.support.environment import ROOT, environment_with


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The whole project is installed."""
    monkeypatch.setattr(command, "entry_points", entry_points)


def test_every_entry_point_of_the_project_resolves():
    points = entry_points(GROUP)
    assert len(points) == 3
    for point in points:
        console = point.load()
        assert console.SECTIONS
        assert callable(console.run)


def test_one_page_lists_the_commands_of_all_packages(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert re.findall(r"^(\w[\w ]+):$", page, re.MULTILINE) == [
        "Ask a service",
        "Fit",
        "Serve",
        "Store",
    ]
    listed = re.findall(r"^  ([\w-]+)  +\w", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {"predict", "models", "fit", "evaluate", "serve", "store", "backup"} <= set(listed)
    assert max(map(len, page.splitlines())) <= 120


def test_every_command_on_the_page_takes_its_options(capsys):
    for one in command.consoles():
        for name in (name for commands in one.SECTIONS.values() for name in commands):
            with pytest.raises(SystemExit) as stopped:
                main([name, "--help"])
            assert stopped.value.code == 0
            assert capsys.readouterr().out.startswith(f"usage: dubito {name} ")


def test_every_command_of_the_modules_is_on_the_page(monkeypatch):
    listed = {name for one in command.consoles() for some in one.SECTIONS.values() for name in some}
    made = []
    add_parser = argparse._SubParsersAction.add_parser

    def note(self, name, **options):
        made.append(name)
        return add_parser(self, name, **options)

    monkeypatch.setattr(argparse._SubParsersAction, "add_parser", note)
    with pytest.raises(SystemExit):
        training.__main__.main(["--help"])
    assert set(made) <= listed
    assert set(service.__main__.COMMANDS) <= listed | {"acquire"}
    made.clear()
    with pytest.raises(SystemExit):
        model_store.__main__.main(["--help"])
    (line,) = (
        one.SECTIONS["Store"]["store"]
        for one in command.consoles()
        if "store" in one.SECTIONS.get("Store", {})
    )
    assert line.split(":")[0].split(" | ") == made


def test_a_recipe_s_modules_are_found_in_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert sys.path[0] == str(tmp_path)


def test_bash_completes_commands_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words):
        line = " ".join(f"'{word}'" for word in ("dubito", *words))
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _dubito; echo ${{COMPREPLY[@]}}"
        told = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=30
        )
        assert told.stderr == ""
        return told.stdout.split()

    assert completed("ev") == ["evaluate"]
    assert completed("labels", "") == ["push", "list", "export", "delete"]
    assert completed("labels", "push", "--rep") == ["--replace"]
    assert completed("fit", "--warm") == ["--warm-start"]
    assert completed("store", "ke") == ["keep", "keygen"]
    assert completed("rank", "--acq") == ["--acquisition"]
    assert completed("fit", "") == []  # files


def test_fish_and_zsh_are_told_of_the_same(capsys):
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "-l warm-start -d 'go on from a published version\\'s weights'" in "\n".join(lines)
    assert all(line.startswith("complete -c dubito -n ") for line in lines)
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


def test_an_unknown_command_is_refused_in_a_line(capsys):
    assert main(["fitt"]) == 2
    assert capsys.readouterr() == (
        "",
        "dubito: expected a command that `dubito --help` lists, got fitt\n",
    )


def test_the_client_alone_has_its_own_commands(monkeypatch, capsys):
    monkeypatch.setattr(command, "entry_points", lambda group: EntryPoints())
    assert main([]) == 0
    page = capsys.readouterr().out
    assert "Ask a service:" in page
    assert "Fit:" not in page
    assert main(["fit"]) == 2


def test_a_package_that_is_not_installed_is_said_in_a_line(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "training.__main__", raising=False)
    monkeypatch.setitem(sys.modules, "training.commands", None)
    assert main(["fit"]) == 1
    assert capsys.readouterr().err.startswith("dubito: fit: ")


def test_the_page_waits_for_no_package_that_it_does_not_need():
    code = """
import sys
from dubito import command
from tests.support.entry_points import entry_points
command.entry_points = entry_points
command.main(["--help"])
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv)))
"""
    heavy = ["numpy", "httpx", "torch", "pydantic", "onnx", "onnxruntime", "fastapi", "pyarrow"]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy],
        env=environment_with(PYTHONPATH=str(ROOT / "client")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.splitlines()[-1], done.returncode) == ("[]", 0), done.stderr


def test_the_package_gives_what_it_names_and_nothing_else():
    import dubito

    assert all(getattr(dubito, name) for name in dubito.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        dubito.nothing  # noqa: B018
