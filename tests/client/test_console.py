import argparse
import subprocess
import sys
from importlib.metadata import EntryPoints

import pytest

import model_store.__main__
import service.__main__
import training.__main__
from dubito import command
from dubito.command import build_parser, main
from tests.support.environment import ROOT, environment_with


def subcommands(parser):
    """The parsers of a parser's subcommands by name, also of those below them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield name, below
                yield from ((f"{name} {inner}", its) for inner, its in subcommands(below))


def test_every_command_has_a_function_and_a_help_text(capsys):
    commands = dict(subcommands(build_parser()))
    assert {"predict", "fit", "serve", "store keep", "label-studio push", "reproduce"} <= {
        *commands
    }
    for name, parser in commands.items():
        assert parser.get_default("run") or [*subcommands(parser)], name
        assert parser.description, name
        assert parser.format_help().startswith(f"usage: dubito {name} ")


@pytest.mark.parametrize(
    ("module", "prefix"), [(training, ""), (service, ""), (model_store, "store ")]
)
def test_the_modules_commands_are_those_of_dubito(module, prefix, monkeypatch):
    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda self, _: parsers.append(self) or exit(0)
    )
    with pytest.raises(SystemExit):
        module.__main__.main(["--help"])
    reference = {name for name, _ in subcommands(build_parser())}
    assert {f"{prefix}{name}" for name, _ in subcommands(parsers[0])} <= reference


def test_bash_completes_commands_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words):
        line = " ".join(f"'{word}'" for word in ("dubito", *words))
        call = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_dubito dubito '{words[-1]}'"
        completed = subprocess.run(
            ["bash", "-c", f"{script}\n{call}; echo ${{COMPREPLY[@]}}"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return completed.stdout.split()

    assert complete("ev") == ["evaluate"]
    assert complete("store", "ke") == ["keep", "keygen"]
    assert complete("labels", "push", "--rep") == ["--replace"]


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fitt"])
    assert stopped.value.code == 2
    assert "invalid choice: 'fitt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("sklearn", "this command needs the extra `training`: pip install 'dubito[training]'"),
        ("onnxruntime", "this command needs the extra `cpu`: pip install 'dubito[cpu]'"),
        ("mine", "No module named 'mine'"),
    ],
)
def test_a_missing_extra_is_named(module, message, monkeypatch, capsys):
    def fail(options):
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr("dubito.command._print_completion", fail)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == f"dubito: {message}\n"


def test_the_client_alone_has_its_own_commands(monkeypatch, capsys):
    monkeypatch.setattr(command, "entry_points", lambda group: EntryPoints())
    commands = {name for name, _ in subcommands(build_parser())}
    assert {"predict", "acquire", "models", "labels push", "jobs list", "completion"} <= commands
    assert not commands & {"fit", "serve", "store", "label-studio"}


def test_a_missing_extra_is_named_in_a_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "training.commands.actions", None)
    assert main(["fit"]) == 1
    assert capsys.readouterr().err.startswith("dubito: ")
    assert sys.path[0] == str(tmp_path)


def test_help_imports_no_package_that_it_does_not_need():
    code = """
import sys
from dubito.command import main
try:
    main(["--help"])
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv)))
"""
    heavy = ["numpy", "httpx", "torch", "pydantic", "onnx", "onnxruntime", "fastapi", "pyarrow"]
    completed = subprocess.run(
        [sys.executable, "-c", code, *heavy],
        env=environment_with(PYTHONPATH=str(ROOT / "client")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (completed.stdout.splitlines()[-1], completed.returncode) == ("[]", 0), completed.stderr


def test_the_package_gives_what_it_names_and_nothing_else():
    import dubito

    assert all(getattr(dubito, name) for name in dubito.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        dubito.nothing  # noqa: B018
