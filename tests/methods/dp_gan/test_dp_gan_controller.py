"""The adaptive number of discriminator steps against a state machine that was written from the paper's text."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rapid.methods.dp_gan.controller import StepController
from rapid.methods.dp_gan.settings import ControllerSettings, DpGanPrivateSettings

LADDER = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]


def settings(fixed: int | None = None, **controller: float) -> DpGanPrivateSettings:
    return DpGanPrivateSettings(discriminator_steps=fixed, controller=ControllerSettings(**controller))


def paper(accuracies: list[float], floor: float, grace: int, decay: float) -> list[tuple[int, int]]:
    """(discriminator step, n_D from then on) of each generator step; the average is written out as a weighted sum."""
    found, place, step, last_move = [], 0, 0, 0
    for update in range(1, len(accuracies) + 1):
        step += LADDER[place]
        seen = accuracies[:update]
        average = decay ** (update - 1) * seen[0]
        average += sum((1 - decay) * decay ** (update - 1 - i) * seen[i] for i in range(1, update))
        if update - last_move >= grace and average <= floor:
            place, last_move = place + 1, update
        found.append((step, LADDER[place]))
    return found


@given(
    accuracies=st.lists(st.integers(0, 20).map(lambda share: share / 20), min_size=1, max_size=20),
    floor=st.sampled_from([math.pi / 10, math.sqrt(0.4), math.sqrt(0.5)]),
    grace=st.sampled_from([2, 4, 5, 8]),
    save_at=st.integers(0, 100),
)
def test_it_is_the_machine_of_the_paper(accuracies: list[float], floor: float, grace: int, save_at: int) -> None:
    """Also where it is saved at any step and goes on as a new object."""
    # irrational floors, so that no average lies on the floor but for rounding
    decay = 1 - 2 / grace
    chosen = settings(floor=floor, decay=decay)
    controller, found = StepController(chosen), []
    left, step = list(accuracies), 0
    while left:
        step += 1
        if step == save_at:
            state = controller.state_dict()
            controller = StepController(chosen)
            controller.load_state_dict(state)
        if controller.count_step():
            controller.count_update(left.pop(0))
            found.append((step, controller.discriminator_steps))
    assert found == paper(accuracies, floor, grace, decay)


def test_with_the_papers_numbers_it_stays_for_two_hundred_steps() -> None:
    controller = StepController(settings(floor=0.6, decay=0.99))
    moves = []
    for update in range(1, 601):
        while not controller.count_step():
            pass
        before = controller.discriminator_steps
        controller.count_update(0.5)
        if controller.discriminator_steps != before:
            moves.append((update, controller.discriminator_steps))
    assert moves == [(200, 2), (400, 5), (600, 10)]


def test_a_good_discriminator_is_left_alone_and_the_floor_counts_as_reached() -> None:
    for accuracy, expected in ((0.61, 1), (0.5, 5)):
        controller = StepController(settings(floor=0.5, decay=0.0))
        for _ in range(4):
            controller.count_update(accuracy)
        assert controller.discriminator_steps == expected


def test_a_fixed_number_divides_the_steps() -> None:
    """As in Algorithm 1: the generator is due where n_D divides t."""
    controller, due = StepController(settings(fixed=3, floor=1.0, decay=0.0)), []
    for step in range(1, 20):
        if controller.count_step():
            due.append(step)
            controller.count_update(0.0)
    assert due == [3, 6, 9, 12, 15, 18]
    assert controller.discriminator_steps == 3
