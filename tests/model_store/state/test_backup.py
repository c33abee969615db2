import io
import stat

import numpy as np
import pytest

from model_store.errors import InvalidInput
from model_store.state.backup import back_up, restore
from model_store.state.database import FILE, Database
from model_store.state.jobs import Jobs
from model_store.state.labels import Label, accept, counts


@pytest.fixture
def state(tmp_path):
    database = Database(tmp_path / "state")
    jobs = Jobs(database)
    for _ in range(3):
        name, folder = jobs.new_folder()
        (folder / "pool.npy").write_bytes(b"rows")
        jobs.add(name, "acquire", "me", "me", {"n": 1}, 10, lambda _: True, 1 << 20)
    completed, running = jobs.claim(0), jobs.claim(0)
    (jobs.folder / completed.id / "answer.json").write_bytes(b"answer")
    jobs.finish(completed.id, "done", "answer.json")
    (jobs.folder / running.id / "scores").mkdir()
    (jobs.folder / running.id / "answer.json.draft").write_bytes(b"ans")
    accept(database, "digits", "format", [Label("a", "3", np.zeros(4, np.float32))])
    yield tmp_path / "state", jobs
    database.close()


def test_restored_state_matches_the_backup(state, tmp_path):
    folder, jobs = state
    with (tmp_path / "state.tar").open("wb") as archive:
        back_up(folder, archive)
    jobs.clear_ended()
    with (tmp_path / "state.tar").open("rb") as archive:
        restore(tmp_path / "new", archive)
    database = Database(tmp_path / "new")
    restored = Jobs(database)
    assert restored.all("me") == jobs.all("me")
    for job in restored.all("me"):
        name = "answer.json" if job.state == "done" else "pool.npy"
        assert (restored.folder / job.id / name).read_bytes() == (
            b"answer" if job.is_over else b"rows"
        )
        assert stat.S_IMODE((restored.folder / job.id).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / FILE).stat().st_mode) == 0o600
    assert counts(database, "digits")["labels"] == 1
    restored.requeue_orphans()
    assert [job.state for job in restored.all("me")] == ["queued", "queued", "done"]
    database.close()
    assert not (folder / "backup.sqlite").exists()


def test_backup_and_restore_refuse_invalid_folders_and_files(state, tmp_path):
    folder, _ = state
    (tmp_path / "file").write_bytes(b"rubbish" * 1000)
    with (tmp_path / "file").open("rb+") as file:
        with pytest.raises(InvalidInput, match="DUBITO_STATE: expected an empty folder"):
            restore(folder, file)
        with pytest.raises(InvalidInput, match="all that `dubito backup` wrote"):
            restore(tmp_path / "new", file)
        for missing in (None, tmp_path / "none"):
            with pytest.raises(InvalidInput, match="the folder of a service's state"):
                back_up(missing, file)


def test_truncated_backup_leaves_the_folder_empty(state, tmp_path):
    with (tmp_path / "state.tar").open("wb") as archive:
        back_up(state[0], archive)
    content = (tmp_path / "state.tar").read_bytes()
    for end in (content.rstrip(b"\0").__len__() // 512 * 512, len(content) // 2, 512, 0):
        with pytest.raises(InvalidInput, match="truncated"):
            restore(tmp_path / "new", io.BytesIO(content[:end]))
    restore(tmp_path / "new", io.BytesIO(content))
    assert (tmp_path / "new" / FILE).exists()


def test_backup_deletes_the_copy_left_by_a_killed_backup(state):
    folder, _ = state
    (folder / "backup.sqlite").write_bytes(b"")
    back_up(folder, io.BytesIO())
    assert not (folder / "backup.sqlite").exists()
