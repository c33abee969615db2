from training import log
from training.commands import print_messages


def test_command_prints_messages_without_prefix(capsys):
    with print_messages():
        log.info("published %s", "m")
    log.info("not printed")
    assert capsys.readouterr() == ("", "published m\n")
    assert not log.handlers


def test_library_messages_are_log_records(caplog):
    with caplog.at_level("INFO", logger="dubito.training"):
        log.info("measuring on %d test rows", 3)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("dubito.training", "measuring on 3 test rows")
    ]
