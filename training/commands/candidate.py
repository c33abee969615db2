"""The command `candidate`, which retrains a model on the service's labels."""

import argparse
import os
import time
from contextlib import closing
from itertools import count
from pathlib import Path

from model_store.errors import DubitoError, InvalidInput
from model_store.state.database import Database
from model_store.state.labels import has_state
from training import log
from training.commands.common import open_store
from training.folders import data_root, runs_folder


def candidate(options: argparse.Namespace) -> None:
    if options.min_labels < 1:
        raise InvalidInput("--min-labels", "1 or more", str(options.min_labels))
    if not options.interval_s > 0:
        raise InvalidInput("--interval-s", "more than 0", str(options.interval_s))
    state = options.state or Path(os.environ.get("DUBITO_STATE", "state"))
    if not options.watch:
        _try_candidate(options, state)
        return
    for poll in count(1):
        try:
            _try_candidate(options, state)
        except DubitoError as error:  # it may be fixed before the next poll
            log.error("%s", error)
        try:
            if poll == 1:
                log.info("repeating every %g s", options.interval_s)
            time.sleep(options.interval_s)
        except KeyboardInterrupt:  # no fit is running, so this is not an error
            return


def _try_candidate(options: argparse.Namespace, state: Path) -> None:
    if not has_state(state):
        log.info("no labels yet: %s does not contain a state", state)
        return
    from training.candidate import count_labels, count_tried_labels, gather_labels, make_candidate
    from training.fit import find_device

    store, root, runs, name = open_store(), data_root(), runs_folder(), options.model
    with closing(Database(state)) as database:
        sources = gather_labels(store, database, name, root, options.data)
        for reason, count in sources.provenance.left_out.items():
            log.info("! leaving out %d labels: %s", count, reason)
        if options.watch:
            before = count_tried_labels(store, database, name)
        else:
            before = count_labels(store, name, sources.parent.manifest.version)
        new = sources.provenance.rows - before
        if new < options.min_labels:
            log.info("%d of %d required new labels", max(new, 0), options.min_labels)
            return
        make_candidate(store, database, sources, runs, root, find_device(options.device))
