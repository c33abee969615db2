"""A discrete-event simulation of replicas behind a balancer: arrivals, micro-batches, autoscaling,
lost nodes.

A replica is what `service/` is, with the engine's own constants: a thread that reads requests and
writes answers, one that computes micro-batches, and one that makes draws ahead. A request that is
alone is computed at once; else micro-batches form, with a pause in which those who come with the
next requests are waited for. Threads of a core share it equally (processor sharing); what a thread
does takes as much processor time as `Costs` says, each time the same. Requests are of one client,
and no larger than a micro-batch.

Not in it: time slices, caches, Python's lock, and connections that open.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from service.engine.admission import FIRST_TRY_S, LAST_TRY_S, LASTING_S, REST_S, TRIED_S
from service.engine.batching import BATCH_ROW_DRAWS, LEAST_AT_ONCE, SMALL_ROW_DRAWS
from service.models.reservoir import PATIENCE_S, PIECE_DRAWS

Balance = Literal["random", "two", "least"]
OK, REFUSED, LOST = 200, 429, 0  # how a request ended; lost: its replica did
IDLE, GATHERING, COMPUTING = range(3)  # what the thread of micro-batches does
ASLEEP, WAITING, MAKING = range(3)  # what the thread of draws does


@dataclass(frozen=True)
class Costs:
    """Processor seconds on one core, and the seconds that a request is on its way."""

    read_s: float
    answer_s: float
    batch_s: float  # of a micro-batch, whatever is in it
    row_draw_s: float  # of arithmetic
    draw_s: float  # of making a draw
    refuse_s: float = 0.0  # of answering that there is no room, before anything is read
    cold_s: float = (
        0.0  # more, of a request that finds its core idle, with other things in its cache
    )
    network_s: float = 0.0  # there and back
    client_s: float = 0.0  # of the client's processor, for a request

    def request_s(self, draws: int, together: float, rows: int = 1) -> float:
        """Return the replica's processor seconds for a request of which `together` share a micro-batch
        and its draws."""
        shared = self.batch_s + draws * self.draw_s
        return self.read_s + self.answer_s + rows * draws * self.row_draw_s + shared / together


@dataclass(frozen=True)
class Failure:
    """Replicas that end at once, and when the balancer has heard of it; a request to them fails
    after `fails_s`."""

    at_s: float
    replicas: int
    noticed_s: float
    fails_s: float = 0.0


@dataclass(frozen=True)
class Publication:
    """A new version: each replica finds it at a moment of its own within `spread_s`, and works on
    it while it answers requests.

    `work_s` is processor time: of the trial, and of loading.
    """

    at_s: float
    spread_s: float
    work_s: float


@dataclass(frozen=True)
class Autoscaler:
    """Kubernetes' autoscaler with the rules of docker/kubernetes/autoscaler.yaml; seconds and rows
    x draws."""

    start_s: float  # from the decision until a replica answers
    least: int = 2
    most: int = 20
    target_row_draws: float = 1600.0
    target_busy: float = math.inf
    interval_s: float = 15.0
    scrape_s: float = 15.0
    window_s: float = 60.0  # over which the queue's length is averaged
    stabilisation_s: float = 300.0
    tolerance: float = 0.1


@dataclass(frozen=True)
class Cluster:
    """Replicas and how requests come to them.

    Attributes:
        cores: the core of each replica; by default one each.
        client_core: the core on which the client computes, if it computes.
        balance: a replica at random, the less busy of two, or the least busy.
        retries: how often a request that was refused or lost is sent again: after `retry_s`, or at
            once.
        hedge_s: after which a request without an answer is sent to another replica as well.
        ready_sets: draw sets that a replica keeps ready, and has at first, unless it has
            `sets_at_first`.
    """

    replicas: int
    cores: tuple[int, ...] | None = None
    client_core: int | None = None
    balance: Balance = "two"
    draws: int = 100
    retries: int = 0
    retry_s: float = 1.0
    hedge_s: float | None = None
    ready_sets: int = 64
    sets_at_first: int | None = None
    max_queued_row_draws: int = 200_000
    overload_row_draws: int = 6_400
    failure: Failure | None = None
    publication: Publication | None = None
    autoscaler: Autoscaler | None = None


@dataclass
class Outcome:
    """What came of the requests, in the order of their ends, and of the replicas.

    Attributes:
        due_s: when each was sent first; latency_s: until its end; status: `OK`, `REFUSED` or
            `LOST`.
        tries: how often each was sent, hedges counted.
        busy_s: processor seconds of each core; batches: rows of each micro-batch.
        replicas: times and how many were there, from each time on; waiting: their mean rows x draws
            at scrapes.
        inside_s: the integral of requests under way over time.
    """

    due_s: np.ndarray
    latency_s: np.ndarray
    status: np.ndarray
    tries: np.ndarray
    busy_s: np.ndarray
    batches: np.ndarray
    end_s: float
    inside_s: float
    replicas: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[tuple[float, float]] = field(default_factory=list)

    def of(self, begin_s: float, end_s: float = math.inf) -> "Outcome":
        here = (self.due_s >= begin_s) & (self.due_s < end_s)
        kept = {
            name: getattr(self, name)[here] for name in ("due_s", "latency_s", "status", "tries")
        }
        return Outcome(**{**self.__dict__, **kept})

    def percentile(self, percent: float) -> float:
        """Return the latency that `percent` of the answered requests do not exceed, in seconds; NaN
        without any."""
        good = self.latency_s[self.status == OK]
        return (
            float(np.quantile(good, percent / 100, method="inverted_cdf"))
            if len(good)
            else math.nan
        )

    def share(self, status: int) -> float:
        return float((self.status == status).mean()) if len(self.status) else math.nan


def poisson_times(
    steps: Sequence[tuple[float, float]], generator: np.random.Generator
) -> np.ndarray:
    """Return arrival times of a Poisson process, given steps of (seconds, requests a second), one
    after another."""
    times, start = [], 0.0
    for seconds, rate in steps:
        times.append(
            np.sort(generator.uniform(start, start + seconds, generator.poisson(rate * seconds)))
        )
        start += seconds
    return np.concatenate(times)


def simulate(
    cluster: Cluster,
    costs: Costs,
    times_s: np.ndarray,
    seed: int,
    rows: np.ndarray | None = None,
) -> Outcome:
    return _Simulation(cluster, costs, times_s, seed, rows).run()


class _Request:
    """A request of a client; `left` is how often it is under way."""

    __slots__ = ("done", "due", "left", "rows", "tries")

    def __init__(self, due: float, rows: int) -> None:
        self.due = due
        self.rows = rows
        self.tries = 0
        self.left = 0
        self.done = False


class _Core:
    """A processor that its threads share equally, by virtual time: the work that each thread has
    had."""

    __slots__ = ("at", "busy_s", "clock", "held", "jobs", "version", "work")

    def __init__(self, clock: "_Simulation") -> None:
        self.clock = clock
        self.jobs: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.work = self.at = self.busy_s = 0.0
        self.version = 0
        self.held = False

    def add(self, work: float, done: Callable[[Any], None], argument: Any) -> None:
        """Have a thread compute for some processor seconds, and then call `done`."""
        self._advance()
        clock = self.clock
        clock.count += 1
        heapq.heappush(self.jobs, (self.work + work, clock.count, done, argument))
        if not self.held:
            self._plan()

    def clear(self) -> None:
        self._advance()
        self.jobs.clear()
        self.version += 1

    def _advance(self) -> None:
        now = self.clock.now
        if self.jobs:
            self.busy_s += now - self.at
            self.work += (now - self.at) / len(self.jobs)
        self.at = now

    def _plan(self) -> None:
        self.version += 1
        if self.jobs:
            left = max(0.0, self.jobs[0][0] - self.work)
            self.clock.at(self.at + left * len(self.jobs), self._fire, self.version)

    def _fire(self, version: int) -> None:
        if version != self.version:
            return
        self._advance()
        self.work, _, done, argument = heapq.heappop(self.jobs)
        self.held = True
        done(argument)
        self.held = False
        self._plan()


class _Admission:
    """How much may wait, as `service/engine/admission.py` has it for a single client."""

    __slots__ = ("burst", "least", "limit", "next_try", "overloaded_until", "patience", "tried")

    def __init__(self, burst: int, least: int) -> None:
        self.burst, self.least, self.limit = burst, min(least, burst), burst
        self.overloaded_until, self.next_try, self.patience, self.tried = (
            -math.inf,
            math.inf,
            math.inf,
            0,
        )

    def refuses(self, now: float, waiting: int, work: int) -> bool:
        if now >= self.overloaded_until:
            self.limit = self.burst
        elif now >= self.next_try:
            self.limit, self.next_try = (
                min(self.burst, max(self.tried, 2 * self.limit)),
                now + TRIED_S,
            )
        if waiting == 0 or waiting + work <= self.limit:
            return False
        if now >= self.overloaded_until:
            self.patience, self.tried = FIRST_TRY_S, 2 * self.least
        elif self.limit > self.least:
            self.patience, self.tried = min(2.0 * self.patience, LAST_TRY_S), 2 * self.tried
        if self.limit > self.least or now >= self.overloaded_until:
            self.limit, self.next_try = self.least, now + self.patience
        self.overloaded_until = now + LASTING_S
        return True


class _Replica:
    def __init__(self, clock: "_Simulation", core: _Core) -> None:
        self.clock, self.core, self.costs = clock, core, clock.costs
        self.draws, self.depth = clock.cluster.draws, clock.cluster.ready_sets
        self.most = max(1, BATCH_ROW_DRAWS // self.draws)
        self.admission = _Admission(
            clock.cluster.max_queued_row_draws, clock.cluster.overload_row_draws
        )
        self.is_there = True
        self.under_way = 0  # as the balancer knows it
        self.inside: Counter[_Request] = Counter()  # how often: a hedge may meet the replica again
        self.row_draws = self.in_work = 0
        self.idle_since = -math.inf
        self.loop: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self.loop_busy = False
        self.queue: deque[_Request] = deque()
        self.model, self.model_turn = IDLE, 0
        self.gathered, self.at_once = 0, LEAST_AT_ONCE
        self.begun = 0.0  # of the micro-batch that is computed
        at_first = clock.cluster.sets_at_first
        self.stock = self.depth if at_first is None else min(at_first, self.depth)
        self.maker, self.maker_turn = ASLEEP, 0

    def end(self) -> list[_Request]:
        """End at once; return the requests that are lost. Its core must be its own."""
        self.is_there = False
        self.core.clear()
        return list(self.inside.elements())

    # The thread that reads and answers.

    def receive(self, request: _Request) -> None:
        self.inside[request] += 1
        self._loop(0.0, self._begin, request)

    def _loop(self, work: float, done: Callable[[Any], None], argument: Any) -> None:
        self.loop.append((work, done, argument))
        if not self.loop_busy:
            self.loop_busy = True
            self._loop_next()

    def _loop_next(self) -> None:
        while self.loop:
            work, done, argument = self.loop.popleft()
            if work > 0.0:
                self.core.add(work, self._loop_done, (done, argument))
                return
            done(argument)
        self.loop_busy = False

    def _loop_done(self, call: tuple[Callable[[Any], None], Any]) -> None:
        call[0](call[1])
        self._loop_next()

    def _begin(self, request: _Request) -> None:
        if self.admission.refuses(self.clock.now, self.row_draws, 1):
            self.loop.appendleft((self.costs.refuse_s, self._refused, request))
        else:
            cold_s = 0.0 if self.core.jobs else self.costs.cold_s
            self.loop.appendleft((self.costs.read_s + cold_s, self._read, request))

    def _read(self, request: _Request) -> None:
        work = request.rows * self.draws
        if self.admission.refuses(self.clock.now, self.row_draws, work):
            self.loop.appendleft((self.costs.refuse_s, self._refused, request))
            return
        self.row_draws += work
        self.in_work += 1
        if self.row_draws <= SMALL_ROW_DRAWS:
            self._loop(
                0.0, self._see_company, request
            )  # after the requests that came together with it
        else:
            self._put(request)

    def _see_company(self, request: _Request) -> None:
        if self.in_work == 1 and self.stock > 0:
            self._take_draws()
            self.clock.batches.append(request.rows)
            work = (
                self.costs.batch_s
                + request.rows * self.draws * self.costs.row_draw_s
                + self.costs.answer_s
            )
            self.loop.appendleft((work, self._answered, request))
        else:
            self._put(request)

    def _refused(self, request: _Request) -> None:
        self._leave(request)
        self.clock.back(self, request, REFUSED)

    def _leave(self, request: _Request) -> None:
        self.inside[request] -= 1
        if self.inside[request] == 0:
            del self.inside[request]

    def _answered(self, request: _Request) -> None:
        self._leave(request)
        self.row_draws -= request.rows * self.draws
        self.in_work -= 1
        if self.in_work == 0:
            self.idle_since = self.clock.now
            if self.maker == WAITING:
                self.clock.at(self.clock.now + REST_S, self._idle, self.maker_turn)
        self.clock.back(self, request, OK)

    # The thread of micro-batches.

    def _put(self, request: _Request) -> None:
        self.queue.append(request)
        if self.model == IDLE or (self.model == GATHERING and len(self.queue) >= self.gathered):
            self._compute()

    def _compute(self) -> None:
        self.gathered = 0
        self.model_turn += 1
        if not self.queue:
            self.model = IDLE
            return
        batch = [self.queue.popleft()]
        rows = batch[0].rows
        while self.queue and len(batch) < self.at_once and rows + self.queue[0].rows <= self.most:
            batch.append(self.queue.popleft())
            rows += batch[-1].rows
        self.model, self.begun = COMPUTING, self.clock.now
        self.clock.batches.append(rows)
        work = self.costs.batch_s + rows * self.draws * self.costs.row_draw_s + self._take_draws()
        self.core.add(work, self._computed, batch)

    def _computed(self, batch: list[_Request]) -> None:
        for request in batch:
            self._loop(self.costs.answer_s, self._answered, request)
        most = 3 * (len(batch) + len(self.queue)) // 4
        self.gathered, self.at_once = most, max(LEAST_AT_ONCE, most)
        if len(self.queue) < self.gathered:
            self.model = GATHERING
            until = 2 * self.clock.now - self.begun  # as long again as the last micro-batch took
            self.clock.at(until, self._gathering_ends, self.model_turn)
        else:
            self._compute()

    def _gathering_ends(self, turn: int) -> None:
        if self.is_there and self.model == GATHERING and turn == self.model_turn:
            self._compute()

    # The thread of draws.

    def _take_draws(self) -> float:
        """Take a draw set; return the processor seconds that it still takes to make: none if one is
        ready."""
        if self.stock == 0:
            return self.draws * self.costs.draw_s
        self.stock -= 1
        if self.stock <= self.depth // 2 and self.maker == ASLEEP:
            self._make(0)
        return 0.0

    def _make(self, made: int) -> None:
        """Go on with a draw set of which some draws are made, once it is time for it."""
        self.maker_turn += 1
        if self.stock <= self.depth // 4 or self._is_idle():
            self._make_now(made)
            return
        self.maker, self.made = WAITING, made
        self.clock.at(self.clock.now + PATIENCE_S, self._waited, self.maker_turn)
        if self.in_work == 0:
            self.clock.at(self.idle_since + REST_S, self._idle, self.maker_turn)

    def _is_idle(self) -> bool:
        return self.in_work == 0 and self.clock.now >= self.idle_since + REST_S

    def _idle(self, turn: int) -> None:
        if self.is_there and turn == self.maker_turn and self.maker == WAITING and self._is_idle():
            self._make_now(self.made)

    def _waited(self, turn: int) -> None:
        if self.is_there and turn == self.maker_turn and self.maker == WAITING:
            self._make_now(self.made)

    def _make_now(self, made: int) -> None:
        self.maker = MAKING
        self.maker_turn += 1
        piece = min(PIECE_DRAWS, self.draws - made)
        self.core.add(piece * self.costs.draw_s, self._made, made + piece)

    def _made(self, made: int) -> None:
        if made >= self.draws:
            self.stock += 1
            made = 0
            if self.stock >= self.depth:
                self.maker = ASLEEP
                return
        self._make(made)


class _Simulation:
    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        times_s: np.ndarray,
        seed: int,
        rows: np.ndarray | None,
    ) -> None:
        self.cluster, self.costs = cluster, costs
        self.times = times_s.tolist()
        self.rows = [1] * len(self.times) if rows is None else rows.tolist()
        self.generator = np.random.default_rng(seed)
        self.now = 0.0
        self.count = 0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.cores: list[_Core] = []
        self.replicas: list[_Replica] = []  # that the balancer knows
        self.batches: list[int] = []
        self.ends: list[tuple[float, float, int, int]] = []
        self.numbers: list[float] = []  # random, made in blocks
        places = range(cluster.replicas) if cluster.cores is None else cluster.cores
        for place in places:
            while len(self.cores) <= place:
                self.cores.append(_Core(self))
            self.replicas.append(_Replica(self, self.cores[place]))
        if cluster.client_core is not None:
            while len(self.cores) <= cluster.client_core:
                self.cores.append(_Core(self))
        self.client: deque[tuple[Callable[[Any], None], Any]] = deque()
        self.client_busy = False
        self.inside = 0
        self.inside_s = self.inside_at = 0.0
        self.sizes: list[tuple[float, int]] = [(0.0, len(self.replicas))]
        self.waiting: list[tuple[float, float]] = []

    def at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, call, argument))

    def run(self) -> Outcome:
        times, rows, events, arrived = self.times, self.rows, self.events, 0
        if self.cluster.failure is not None:
            self.at(self.cluster.failure.at_s, self._fail, self.cluster.failure)
        if self.cluster.publication is not None:
            for replica, share in zip(
                self.replicas, self.generator.random(len(self.replicas)), strict=True
            ):
                looks_s = self.cluster.publication.at_s + share * self.cluster.publication.spread_s
                self.at(looks_s, self._load_version, replica)
        if self.cluster.autoscaler is not None:
            _Scaling(self, self.cluster.autoscaler)
        while arrived < len(times) or events:
            if arrived < len(times) and (not events or times[arrived] <= events[0][0]):
                self.now = times[arrived]
                self._arrive(_Request(self.now, rows[arrived]))
                arrived += 1
            else:
                self.now, _, call, argument = heapq.heappop(events)
                call(argument)
        self._count_inside(0)
        for core in self.cores:
            core._advance()
        due, latency, status, tries = (
            np.array([end[i] for end in self.ends], dtype=kind)
            for i, kind in enumerate((float, float, int, int))
        )
        busy = np.array([core.busy_s for core in self.cores])
        return Outcome(
            due,
            latency,
            status,
            tries,
            busy,
            np.array(self.batches),
            self.now,
            self.inside_s,
            self.sizes,
            self.waiting,
        )

    # The client.

    def _arrive(self, request: _Request) -> None:
        self._count_inside(1)
        if self.cluster.hedge_s is not None:
            self.at(self.now + self.cluster.hedge_s, self._hedge, request)
        self._on_client(self._send, request)

    def _on_client(self, call: Callable[[Any], None], argument: Any) -> None:
        """Do one of the two halves of the client's work for a request."""
        if self.cluster.client_core is None:
            call(argument)
            return
        self.client.append((call, argument))
        if not self.client_busy:
            self._client_next(None)

    def _client_next(self, done: tuple[Callable[[Any], None], Any] | None) -> None:
        if done is not None:
            done[0](done[1])
        self.client_busy = bool(self.client)
        if self.client:
            assert self.cluster.client_core is not None
            work = self.costs.client_s / 2
            self.cores[self.cluster.client_core].add(work, self._client_next, self.client.popleft())

    def _send(self, request: _Request) -> None:
        request.tries += 1
        request.left += 1
        replica = self._choose()
        replica.under_way += 1
        if replica.is_there:
            replica.receive(request)
        else:
            assert self.cluster.failure is not None
            self.at(self.now + self.cluster.failure.fails_s, self._lose, (replica, request))

    def _choose(self) -> _Replica:
        replicas = self.replicas
        if self.cluster.balance == "least":
            return min(replicas, key=lambda replica: (replica.under_way, self._random()))
        first = replicas[int(self._random() * len(replicas))]
        if self.cluster.balance == "random" or len(replicas) == 1:
            return first
        second = first
        while second is first:
            second = replicas[int(self._random() * len(replicas))]
        return second if second.under_way < first.under_way else first

    def _random(self) -> float:
        if not self.numbers:
            self.numbers = self.generator.random(4096).tolist()
        return self.numbers.pop()

    def _hedge(self, request: _Request) -> None:
        if not request.done and len(self.replicas) > 1:
            self._send(request)

    def _lose(self, sent: tuple[_Replica, _Request]) -> None:
        self.back(*sent, LOST)

    def back(self, replica: _Replica, request: _Request, status: int) -> None:
        """Take in how a try of a request ended."""
        replica.under_way -= 1
        self._on_client(self._ended, (request, status))

    def _ended(self, ended: tuple[_Request, int]) -> None:
        request, status = ended
        request.left -= 1
        if request.done:
            return
        if status != OK:
            if request.left > 0:  # its hedge is still under way
                return
            if request.tries <= self.cluster.retries:
                wait = self.cluster.retry_s if status == REFUSED else 0.0
                self.at(self.now + wait, self._send, request)
                return
        request.done = True
        self._count_inside(-1)
        self.ends.append(
            (request.due, self.now - request.due + self.costs.network_s, status, request.tries)
        )

    def _count_inside(self, change: int) -> None:
        self.inside_s += self.inside * (self.now - self.inside_at)
        self.inside_at = self.now
        self.inside += change

    def _fail(self, failure: Failure) -> None:
        ended = self.replicas[: failure.replicas]
        for replica in ended:
            for request in replica.end():
                self.back(replica, request, LOST)
        self.at(self.now + failure.noticed_s, self._notice, ended)

    def _load_version(self, replica: _Replica) -> None:
        assert self.cluster.publication is not None
        replica.core.add(self.cluster.publication.work_s, lambda _: None, None)

    def _notice(self, ended: list[_Replica]) -> None:
        self.replicas = [replica for replica in self.replicas if replica not in ended]
        self.sizes.append((self.now, len(self.replicas)))


class _Scaling:
    """The autoscaler: looks at queues and processors, and adds and takes away replicas with cores
    of their own."""

    def __init__(self, clock: _Simulation, rules: Autoscaler) -> None:
        self.clock, self.rules = clock, rules
        self.last_s = clock.times[-1] if clock.times else 0.0
        self.samples: dict[_Replica, deque[int]] = {}
        self.window = max(1, round(rules.window_s / rules.scrape_s))
        self.busy: dict[_Replica, float] = {}
        self.share = 0.0
        self.wanted: deque[tuple[float, int]] = deque()
        self.coming = 0
        clock.at(rules.scrape_s, self._scrape, None)
        clock.at(rules.interval_s, self._decide, None)

    def _scrape(self, _: None) -> None:
        clock, replicas = self.clock, self.clock.replicas
        clock.waiting.append(
            (clock.now, sum(replica.row_draws for replica in replicas) / len(replicas))
        )
        for replica in replicas:
            self.samples.setdefault(replica, deque(maxlen=self.window)).append(replica.row_draws)
            replica.core._advance()
        spent = [
            replica.core.busy_s - self.busy.get(replica, replica.core.busy_s)
            for replica in replicas
        ]
        self.share = sum(spent) / (len(replicas) * self.rules.scrape_s)
        self.busy = {replica: replica.core.busy_s for replica in replicas}
        if clock.now < self.last_s:
            clock.at(clock.now + self.rules.scrape_s, self._scrape, None)

    def _decide(self, _: None) -> None:
        clock, rules, now = self.clock, self.rules, self.clock.now
        there = len(clock.replicas)
        means = [
            sum(held) / len(held)
            for replica in clock.replicas
            if (held := self.samples.get(replica))
        ]
        if means:
            queue = sum(means) / len(means) / rules.target_row_draws
            ratio = max(queue, self.share / rules.target_busy)
            wanted = there if abs(ratio - 1.0) <= rules.tolerance else math.ceil(there * ratio)
            total = there + self.coming
            self.wanted.append((now, wanted))
            while self.wanted[0][0] < now - rules.stabilisation_s:
                self.wanted.popleft()
            down = max(number for _, number in self.wanted)
            if wanted > total:
                self._add(min(wanted, max(2 * total, total + 4), rules.most) - total)
            elif down < there and self.coming == 0:
                self._take(max(down, rules.least, math.floor(0.9 * there)))
        if now < self.last_s:
            clock.at(now + rules.interval_s, self._decide, None)

    def _add(self, count: int) -> None:
        for _ in range(count):
            self.coming += 1
            self.clock.at(self.clock.now + self.rules.start_s, self._started, None)

    def _started(self, _: None) -> None:
        self.coming -= 1
        clock = self.clock
        clock.cores.append(_Core(clock))
        clock.replicas.append(_Replica(clock, clock.cores[-1]))
        clock.sizes.append((clock.now, len(clock.replicas)))

    def _take(self, count: int) -> None:
        """Send nothing more to some, which end what they have."""
        self.clock.replicas = self.clock.replicas[:count]
        self.clock.sizes.append((self.clock.now, count))
