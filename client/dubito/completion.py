"""`dubito completion SHELL`: a script that has a shell complete commands and options, made of the
parsers as they are."""

import argparse
from collections.abc import Iterator, Mapping

Words = Mapping[str, str]  # what each means

BASH = """_dubito() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} known=
    if (( COMP_CWORD == 1 )); then
        known="{commands}"
    else
        case "${{COMP_WORDS[1]}}:${{COMP_WORDS[2]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o default -F _dubito dubito"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
SHELLS = ("bash", "zsh", "fish")


def script(shell: str, commands: Words, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script of a shell.

    Args:
        commands: by name, what they do.
        parsers: of the commands, or of all commands of a package, of which one has that name.
    """
    known = {name: below(parsers[name]).get(name, parsers[name]) for name in parsers}
    if shell == "fish":
        return "\n".join(_fish(commands, known))
    cases = "\n".join(f"            {line}" for line in _cases(known))
    return ZSH * (shell == "zsh") + BASH.format(commands=" ".join(commands), cases=cases)


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the long options of a parser, and what they mean."""
    return {
        option: (action.help or "").split("; ")[0] % vars(action)
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and action.help is not argparse.SUPPRESS
    }


def _cases(known: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, parser in known.items():
        subcommands = below(parser)
        for inner, its in subcommands.items():
            yield _case(f"{name}:{inner}", its)
        yield (
            f'{name}:*) known="{" ".join(subcommands)}" ;;'
            if subcommands
            else _case(f"{name}:*", parser)
        )


def _case(pattern: str, parser: argparse.ArgumentParser) -> str:
    """Return a case of a command that takes files, but where an option begins."""
    return f'{pattern}) [[ $word == -* ]] && known="{" ".join(_options(parser))}" ;;'


def _fish(commands: Words, known: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, does in commands.items():
        yield f"complete -c dubito -n __fish_use_subcommand -f -a {name} -d {_quote(does)}"
    for name, parser in known.items():
        seen = f"__fish_seen_subcommand_from {name}"
        subcommands = below(parser)
        if subcommands:
            none = f"not __fish_seen_subcommand_from {' '.join(subcommands)}"
            yield f"complete -c dubito -n '{seen}; and {none}' -f -a '{' '.join(subcommands)}'"
        for inner, its in (subcommands or {"": parser}).items():
            where = f"{seen}; and __fish_seen_subcommand_from {inner}" if inner else seen
            for option, means in _options(its).items():
                yield f"complete -c dubito -n '{where}' -l {option[2:]} -d {_quote(means)}"


def _quote(text: str) -> str:
    return "'" + " ".join(text.replace("\\", "").replace("'", "\\'").split()) + "'"
