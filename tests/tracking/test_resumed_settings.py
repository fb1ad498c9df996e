"""What a resumed run may change is recorded with its segment."""

from pathlib import Path

from pipeline.checkpoints import resume_rules
from pipeline.config import compose, key_kinds
from pipeline.config.resolve import resolve
from pipeline.config.schema import Kind
from pipeline.tracking import horizons, resumed_settings
from pipeline.tracking.journal_file import Past
from pipeline.tracking.journal_lines import RunStart

STOP = "+training.callbacks.stop={_target_: keras.callbacks.TerminateOnNaN}"


def spec_of(*overrides):
    return resolve(compose.composed(list(overrides)), list(overrides))


def test_each_setting_that_may_change_is_recorded_in_one_place():
    """Horizons have entries of their own; the effective batch may not change."""
    free = key_kinds.keys_where(
        lambda facts: facts.kind == Kind.TRAINING and not facts.fixed
    )
    elsewhere = {*horizons.KEYS, "accumulation.effective_batch_size"}
    assert set(free) - elsewhere == set(resumed_settings.KEYS)


def test_changed_settings_are_those_that_differ_from_the_first_ones():
    first = spec_of("model=mlp").recorded
    now = spec_of("model=mlp", "training.evaluate_every=3", STOP).recorded
    assert resumed_settings.changed(first, first, {}) == {}
    assert resumed_settings.changed(first, now, {}) == {
        "training.evaluate_every": 3,
        "training.callbacks": {"stop": {"_target_": "keras.callbacks.TerminateOnNaN"}},
    }


def test_a_key_that_an_older_record_lacks_has_its_default():
    first = {"accumulation": {}, "training": spec_of().recorded["training"]}
    now = {**first, "accumulation": {"same_noise": True, "moving_statistics": "micro"}}
    defaults = {"accumulation": {"same_noise": False, "moving_statistics": "micro"}}
    assert resumed_settings.changed(first, now, defaults) == {
        "accumulation.same_noise": True
    }


def test_the_lines_of_a_resume_compare_with_the_last_segment():
    first = spec_of("model=mlp")
    last = spec_of("model=mlp", "training.evaluate_every=3", STOP)
    settings = resumed_settings.changed(first.recorded, last.recorded, {})
    segment = {"cut": {"effective_batch_size": 128}}
    start = RunStart(store=first.config.tracking.uri, segment=segment)
    past = Past(
        Path("journal.jsonl"), start=start, resumed=[{"after": 5, "settings": settings}]
    )

    recorded = resumed_settings.with_last(first.recorded, past.resumed)
    assert resume_rules.changes(recorded, last, past) == []
    assert resume_rules.changes(recorded, first, past) == [
        "training.evaluate_every epoch (was 3)",
        "training.callbacks.stop._target_ None (was keras.callbacks.TerminateOnNaN)",
    ]
    assert resume_rules.changes(first.recorded, last, past) == [
        "training.evaluate_every 3 (was epoch)",
        "training.callbacks.stop._target_ keras.callbacks.TerminateOnNaN (was None)",
    ]


def test_a_rerun_names_the_settings_of_later_segments():
    segments = [
        {"after": 0},
        {"after": 3, "settings": {"training.callbacks": {}, "any\nother": 1}},
        {"after": 8, "settings": {"training.keep_best.mode": "min"}},
    ]
    assert resumed_settings.differences(segments) == [
        "config: the run was resumed after update 3 with other values of "
        "training.callbacks; the rerun uses the first values",
        "config: the run was resumed after update 8 with other values of "
        "training.keep_best.mode; the rerun uses the first values",
    ]
