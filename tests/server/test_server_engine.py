"""The engine when jobs come, go and fail at any moment: no row stays behind, no client waits for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapid_server.engine import (
    MOST_OWN_RECORDS,
    MOST_RECORDS,
    ClientFullError,
    Engine,
    EngineFailedError,
    EngineFullError,
    EngineStoppedError,
)
from rapid_server.job import Job
from rapid_server.scheduler import RIDERS, Load, Turns, share
from rapid_server.worker import Worker
from tests_support import Fails

from rapid.errors import InputError
from rapid.sampling.generator import Generator


@contextmanager
def running(models: dict[str, Any], **options: Any) -> Iterator[Engine]:
    engine = Engine(models, **({"batch": 16} | options))
    try:
        assert engine.ready.wait(60)
        yield engine
    finally:
        engine.close()
    assert not engine._thread.is_alive()


@pytest.fixture(scope="module")
def engine(generator: Generator) -> Iterator[Engine]:
    with running({"a": generator, "b": generator}) as engine:
        yield engine


async def collect(job: Job) -> list[Any]:
    return [one async for batch in job for one in batch]


async def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def rows_in_use(engine: Engine) -> int:
    return sum(len(worker._trajectories) for worker in engine._workers.values())


def test_jobs_that_are_cancelled_at_any_moment(engine: Engine) -> None:
    """Also while the engine looks at the job: a request without a job would end the engine."""

    async def one(rng: random.Random) -> None:
        job = engine.submit(rng.choice("ab"), rng.randint(1, 12), steps=rng.choice([1, 2, 8]))
        reading = asyncio.create_task(collect(job))
        await asyncio.sleep(rng.random() * 0.05)
        job.cancel()
        reading.cancel()
        job.cancel()

    async def many() -> None:
        for number in range(10):
            await asyncio.gather(*(one(random.Random(100 * number + other)) for other in range(40)))
        await until(lambda: engine.idle)
        assert len(await collect(engine.submit("a", 2))) == 2

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(many())
    finally:
        sys.setswitchinterval(interval)
    assert engine.ready.is_set()
    assert engine.queued == 0
    assert rows_in_use(engine) == 0


def test_lost_jobs_do_not_count(generator: Generator) -> None:
    """A job whose response was lost in an unforeseen way must not count for ever."""

    async def work() -> None:
        job = engine.submit("a", 30, client="x", steps=1)
        with pytest.raises(ClientFullError):
            engine.submit("a", 30, client="x")
        await collect(job)
        # made, but not sent
        with pytest.raises(ClientFullError) as found:
            engine.submit("a", 30, client="x")
        assert 1 <= found.value.retry_after <= 60
        job.sent = 25
        other = engine.submit("a", 30, client="x", steps=1)
        with pytest.raises(EngineFullError) as full:
            engine.submit("a", 30, client="y")
        assert not isinstance(full.value, ClientFullError)
        other.cancel()
        engine.submit("a", 30, client="x", steps=1).cancel()
        await until(lambda: engine.idle)

    with running({"a": generator}, max_client=40, max_queued=60) as engine:
        asyncio.run(work())
        gc.collect()
        assert not engine._open


def test_retry_after(generator: Generator) -> None:
    """The estimate is within a factor of five, already after a few images."""

    async def work() -> None:
        begin = time.monotonic()
        job = engine.submit("a", 200)
        made = 0
        async for batch in job:
            made += len(batch)
            if made >= 20:
                break
        rate = made / (time.monotonic() - begin)
        with pytest.raises(EngineFullError) as found:
            engine.submit("a", 200)
        job.cancel()
        expected = 200 / rate
        assert expected / 5 - 2 < found.value.retry_after < 5 * expected + 2

    with running({"a": generator}, max_client=200, max_queued=200) as engine:
        asyncio.run(work())


def test_a_step_that_fails(generator: Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Its jobs fail, the other model's and later ones do not, and no row is lost."""
    fails = Fails(generator)

    async def work() -> None:
        for _ in range(3):
            bad, good = [engine.submit("bad", 5) for _ in range(3)], engine.submit("good", 5)
            fails.failing = True
            for job in bad:
                with pytest.raises(EngineFailedError):
                    await collect(job)
            assert len(await collect(good)) == 5
            fails.failing = False
            assert len(await collect(engine.submit("bad", 3))) == 3
            with pytest.raises(InputError):
                await engine.record_image("bad", -1)
        await until(lambda: engine.idle)

    with caplog.at_level(logging.CRITICAL), running({"bad": fails, "good": generator}) as engine:
        asyncio.run(work())
        assert rows_in_use(engine) == 0


def test_a_model_that_always_fails_does_not_take_all_the_time(generator: Generator) -> None:
    fails = Fails(generator)

    async def again(stop: asyncio.Event) -> None:
        while not stop.is_set():
            with pytest.raises(EngineFailedError):
                await collect(engine.submit("bad", 1, steps=1))

    async def work() -> None:
        stop = asyncio.Event()
        fails.failing = True
        tasks = [asyncio.create_task(again(stop)) for _ in range(4)]
        assert len(await asyncio.wait_for(collect(engine.submit("good", 20)), 60)) == 20
        stop.set()
        await asyncio.gather(*tasks)

    logging.disable(logging.CRITICAL)
    try:
        with running({"bad": fails, "good": generator}) as engine:
            asyncio.run(work())
    finally:
        logging.disable(logging.NOTSET)


def test_two_models_get_equal_time(engine: Engine) -> None:
    """Although one has fifty jobs, and the other one."""

    async def work() -> None:
        many = [engine.submit("a", 20) for _ in range(50)]
        await asyncio.sleep(0.3)
        before = dict(engine._seconds_used)
        one = engine.submit("b", 60)
        await collect(one)
        spent = {name: engine._seconds_used[name] - before[name] for name in "ab"}
        for job in many:
            job.cancel()
        # b was idle before, and has not saved up time
        assert spent["b"] / max(spent["a"], 1e-9) > 0.5 or spent["a"] < 0.2
        await until(lambda: engine.idle)

    asyncio.run(work())


def test_many_record_images_delay_neither_images_nor_the_event_loop(engine: Engine) -> None:
    async def work() -> None:
        clients = [str(number % 3) for number in range(300)]
        records = [asyncio.create_task(engine.record_image("a", 0, client=client)) for client in clients]
        await asyncio.sleep(0)
        begin = time.monotonic()
        engine.submit("b", 1).cancel()
        # the lock is free while they are made
        assert time.monotonic() - begin < 0.2
        await asyncio.wait_for(collect(engine.submit("a", 1)), 20)
        for record in records:
            record.cancel()
        await asyncio.gather(*records, return_exceptions=True)

    asyncio.run(work())
    assert rows_in_use(engine) == 0


def test_record_images_of_clients_that_went_hold_up_nobody(engine: Engine) -> None:
    async def use() -> None:
        job = engine.submit("a", 500, steps=20)
        clients = [str(number % 8) for number in range(2 * MOST_RECORDS)]
        asked = [asyncio.create_task(engine.record_image("a", 0, client=client)) for client in clients]
        await asyncio.sleep(0)
        refused = [one for one in asked if one.done() and one.exception() is not None]
        # the engine takes some meanwhile
        assert 1 <= len(refused) <= MOST_RECORDS
        with pytest.raises(EngineFullError, match="images of records are waiting"):
            refused[0].result()
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        # at most one image between two steps
        assert (await asyncio.wait_for(engine.record_image("a", 0), 5)).dtype == np.uint8
        job.cancel()

    asyncio.run(use())


def test_a_client_does_not_wait_for_all_records_of_another(engine: Engine) -> None:
    async def use() -> None:
        job = engine.submit("a", 500, steps=20)
        many = [asyncio.create_task(engine.record_image("a", 0, client="many")) for _ in range(MOST_OWN_RECORDS)]
        await asyncio.sleep(0)
        with pytest.raises(ClientFullError, match="of your images of records"):
            await asyncio.gather(*(engine.record_image("a", 0, client="many") for _ in range(MOST_OWN_RECORDS)))
        await asyncio.wait_for(engine.record_image("a", 0, client="one"), 20)
        assert sum(one.done() for one in many) < MOST_OWN_RECORDS
        job.cancel()
        await asyncio.gather(*many)

    asyncio.run(use())


def test_the_loop_of_a_job_may_be_closed(engine: Engine) -> None:
    async def leave() -> None:
        engine.submit("a", 200)
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    end = time.monotonic() + 20
    while not engine.idle:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engine.ready.is_set()


@pytest.mark.parametrize("seconds", [0, 0.01, 0.1, 0.6])
@pytest.mark.parametrize("way", ["drain", "stop"])
def test_the_end_at_any_moment(generator: Generator, way: str, seconds: float) -> None:
    """Each job completes or gets EngineStoppedError, also while the engine still measures."""
    engine = Engine({"a": generator, "b": generator}, batch=16)

    async def work() -> list[Any]:
        jobs = [collect(engine.submit(name, 6)) for name in "aabb"] + [engine.record_image("a", 0)]
        timer = threading.Timer(seconds, engine.drain if way == "drain" else engine.stop)
        timer.start()
        found = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
        timer.join()
        assert not engine.ready.is_set()
        with pytest.raises(EngineStoppedError):
            engine.submit("a", 1)
        return found

    found = asyncio.run(work())
    for one in found:
        if way == "drain":
            assert not isinstance(one, Exception), one
        else:
            assert not isinstance(one, Exception) or isinstance(one, EngineStoppedError)
    engine.close()
    engine.close()
    assert not engine.ready.is_set()
    assert engine.idle


@pytest.mark.parametrize("small", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("steps", [2, 20])
def test_an_endless_stream_of_small_requests_does_not_starve_a_large_one(
    generator: Generator, small: int, batch: int, steps: int
) -> None:
    """It gets an eighth of the steps and of the decoder, although there are always enough small requests."""
    worker = Worker(generator, batch)
    worker.measure()
    labels = np.zeros(1000, np.int64)
    large = worker.make_request(1000, labels.tolist(), 1, steps)
    worker.add(large)
    seed, made, of_large, begin = 0, 0, 0, time.monotonic()
    while of_large < 5:
        assert time.monotonic() - begin < 60
        while sum(one.missing for one in worker.requests if one is not large) < max(2 * batch, 2 * small):
            seed += 1
            worker.add(worker.make_request(small, labels[:small].tolist(), seed, steps))
        for request, images in worker.step().images:
            made += len(images)
            of_large += len(images) if request is large else 0
    assert of_large / made > 0.03, (of_large, made)


@given(
    loads=st.lists(st.builds(Load, missing=st.integers(1, 3000), rows=st.integers(1, 300)), min_size=1, max_size=12),
    batch=st.integers(1, 64),
    fixed=st.integers(0, 50),
)
def test_every_request_has_its_turn(loads: list[Load], batch: int, fixed: int) -> None:
    """With requests that never end: each has rows within a bounded time, and turns take at most their share."""

    def seconds(rows: int) -> float:
        return fixed + rows

    turns, own, taken = Turns(), 0.0, 0.0
    served = [0] * len(loads)
    most = int((1 + 1 / RIDERS) * (len(loads) + 2) * max(batch, seconds(batch))) + 10
    for step in range(1, min(most, 3000)):
        now = [load._replace(served=last) for load, last in zip(loads, served, strict=True)]
        plain = share(now, batch, seconds)
        granted = turns.correct(now, plain, batch, seconds)
        assert 0 < sum(granted) <= batch
        assert all(0 <= rows <= load.rows for rows, load in zip(granted, loads, strict=True))
        if granted == plain:
            own += seconds(sum(granted))
        else:
            taken += seconds(sum(granted))
        served = [step if rows else last for rows, last in zip(granted, served, strict=True)]
        assert taken <= RIDERS * own + 1e-9
    if most < 3000:
        assert min(served) > 0
