"""Tests of the examples' ranking model, its data and its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recommender.ranking import (
    RankingConfig,
    RankingModel,
    load_ranking_model,
    ranking_loss,
    save_ranking_model,
    task_labels,
)
from recommender.ranking_data import (
    CONTEXTS,
    RATING_ACTIONS,
    EndlessBatches,
    RankingData,
    RankingWindows,
    Split,
    check_ranking_batch,
)
from recommender.ranking_metrics import (
    auc,
    evaluate_ranking,
    fit_rates,
    mean_entropy,
    normalized_entropy,
)
from recommender.saved import load_model
from torch import Tensor

from hstu_attn import HSTULayerConfig
from hstu_attn.data import AttentionCost, BalancedBatchSampler, EventLog, open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.data.synthetic_layouts import write_synthetic_amazon, write_synthetic_kuairand

SIZE = {"num_users": 30, "num_items": 100, "mean_events": 24}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread: more do not speed up small tensors, and may wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EventLog:
    return open_event_log(write_synthetic_kuairand(tmp_path_factory.mktemp("data"), **SIZE))


@pytest.fixture
def data(log: EventLog) -> RankingData:
    return RankingData(log, max_history=9, max_targets=4, held_out=3, user_buckets=1000)


def small_model(data: RankingData, **changes: Any) -> RankingModel:
    """Makes a model with weights so large that every input matters."""
    settings: dict[str, Any] = {"tasks": ("is_click", "long_view"), "dim": 16, "heads": 2}
    settings.update(layers=2, max_history=9, max_targets=4, sizes=data.sizes, actions=data.actions)
    model = RankingModel(RankingConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# --- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [3, 10_000])
def test_auc_against_all_pairs(values: int) -> None:
    labels = torch.rand(300).numpy() < 0.3
    scores = torch.randint(values, (300,)).double().numpy()  # with 3 values most pairs are tied
    true, false = scores[labels][:, None], scores[~labels]
    expected = ((true > false) + 0.5 * (true == false)).mean()
    assert auc(labels, scores) == pytest.approx(expected, abs=1e-12)
    assert auc(~labels, scores) == pytest.approx(1 - expected, abs=1e-12)


def test_auc_where_it_is_not_defined() -> None:
    assert math.isnan(auc(np.ones(3, bool), np.arange(3.0)))
    assert math.isnan(normalized_entropy(np.zeros(3, bool), np.arange(3.0)))
    with pytest.raises(ValueError, match="scores: expected no NaN, got one in row 1"):
        auc(np.array([True, False]), np.array([0.0, math.nan]))


def test_normalized_entropy() -> None:
    labels = torch.rand(500).numpy() < 0.2
    logits = 3 * torch.randn(500).double().numpy()
    p, rate = 1 / (1 + np.exp(-logits)), labels.mean()
    loss = -np.where(labels, np.log(p), np.log(1 - p)).mean()
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert normalized_entropy(labels, logits) == pytest.approx(loss / entropy, rel=1e-12)
    always = np.full(500, math.log(rate / (1 - rate)))
    assert normalized_entropy(labels, always) == pytest.approx(1.0, rel=1e-12)
    # The logits are so large that exp() overflows or a probability rounds to 1.
    sure = np.where(labels, 2000.0, -2000.0)
    assert normalized_entropy(labels, sure) == 0.0
    assert normalized_entropy(labels, -sure) == pytest.approx(2000 / entropy, rel=1e-12)


def test_tasks_without_an_entropy_do_not_count() -> None:
    metrics = {"ne/a": 0.5, "auc/a": 0.9, "ne/b": math.nan, "ne/c": 0.7}
    assert mean_entropy(metrics) == pytest.approx(0.6)
    assert mean_entropy({"ne/a": math.nan}) == math.inf


def test_rates_against_plain_loops(data: RankingData) -> None:
    tasks = ("is_click", "is_like")
    rates = fit_rates(data, tasks, quality=lambda scorer: scorer.items.square().sum().item())  # type: ignore[attr-defined]
    events = data.training_events()
    labels = data.labels(data.bits[events], tasks).astype(float)
    base = labels.mean(axis=0)
    users, items = data.user_of(events), np.asarray(data.log.items)[events]
    batch = data.batch(data.windows("test"))
    owner = torch.repeat_interleave(torch.arange(data.log.num_users), batch.target_offsets.diff())

    def logit(rate: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.log(rate / (1 - rate))

    for row, (item, user) in enumerate(zip(batch.target_items.tolist(), owner, strict=True)):
        # The smallest strength gives the largest additions, and so the highest `quality`.
        of_item = (labels[items == item].sum(0) + base) / ((items == item).sum() + 1)
        of_user = (labels[users == int(user)].sum(0) + base) / ((users == int(user)).sum() + 1)
        expected = {
            "base rate": logit(base),
            "item rate": logit(of_item),
            "item and user rate": logit(of_item) + logit(of_user) - logit(base),
        }
        for name, scorer in rates.items():
            np.testing.assert_allclose(scorer(batch)[row], expected[name], rtol=1e-9)


def test_rates_of_a_task_with_one_label(tmp_path: Path) -> None:
    paths = write_synthetic_kuairand(tmp_path, **SIZE)
    data = RankingData(open_event_log(paths, only="long_view"), 9, 4, 3, 1000)
    with pytest.raises(ValueError, match=r"got is_click at a rate of 100% \(is it what --only"):
        fit_rates(data, ("is_click", "long_view"), lambda scorer: 0.0)


def test_evaluation_takes_all_candidates(data: RankingData) -> None:
    tasks = ("is_click", "long_view")
    table = torch.randn(data.log.num_items, 2)
    windows = data.windows("test")
    metrics = evaluate_ranking(
        lambda batch: table[batch.target_items],
        data,
        windows,
        tasks,
        rows_per_batch=100,
        device=CPU,
    )
    events = np.concatenate(
        [np.arange(a, b) for a, b in zip(windows.requests, windows.ends, strict=True)]
    )
    labels = data.labels(data.bits[events], tasks)
    scores = table[torch.from_numpy(data.log.items[events].astype(np.int64))].double().numpy()
    for column, task in enumerate(tasks):
        assert metrics[f"auc/{task}"] == auc(labels[:, column], scores[:, column])
        expected = normalized_entropy(labels[:, column], scores[:, column])
        assert metrics[f"ne/{task}"] == pytest.approx(expected)


# --- windows and batches -------------------------------------------------------------------------


def test_splits_are_by_time_and_disjoint(data: RankingData) -> None:
    candidates: dict[Split, list[int]] = {}
    for split in ("training", "validation", "test"):
        windows = data.windows(split)
        assert (windows.starts >= data.log.offsets[windows.users]).all()
        assert (windows.ends <= data.log.offsets[windows.users + 1]).all()
        assert (windows.requests - windows.starts <= 9).all()
        runs = [np.arange(a, b) for a, b in zip(windows.requests, windows.ends, strict=True)]
        candidates[split] = np.concatenate(runs).tolist()
    together = sorted(event for events in candidates.values() for event in events)
    assert together == list(range(data.log.num_events))  # each event is in one split, once
    assert sorted(candidates["training"]) == data.training_events().tolist()
    for start, end in zip(data.log.offsets[:-1], data.log.offsets[1:], strict=True):
        of_user = [
            [event for event in candidates[split] if start <= event < end]
            for split in ("training", "validation", "test")
        ]
        assert len(of_user[1]) == len(of_user[2]) == 3
        assert max(of_user[0]) < min(of_user[1]) <= max(of_user[1]) < min(of_user[2])
    with pytest.raises(ValueError, match=r"split: expected one of .* got 'all'"):
        data.windows("all")  # type: ignore[arg-type]


def test_a_share_of_the_events_is_held_out_by_time(log: EventLog) -> None:
    data = RankingData(log, 9, 4, held_out=3, user_buckets=1000, held_out_share=0.2)
    held = round(0.2 * log.num_events)
    times = np.sort(log.timestamps)
    cuts = times[-2 * held], times[-held]
    assert data.most_targets == 4
    found = {}
    for split in ("training", "validation", "test"):
        windows = data.windows(split)
        sizes = windows.ends - windows.requests
        assert 1 <= sizes.min() <= sizes.max() <= 4
        # The history has all earlier events of the user, including held-out ones.
        first = log.offsets[windows.users]
        assert (windows.starts == np.maximum(windows.requests - 9, first)).all()
        runs = [np.arange(a, b) for a, b in zip(windows.requests, windows.ends, strict=True)]
        found[split] = np.sort(np.concatenate(runs))
    late = [log.timestamps >= cut for cut in cuts]
    assert found["training"].tolist() == np.flatnonzero(~late[0]).tolist()
    assert found["validation"].tolist() == np.flatnonzero(late[0] & ~late[1]).tolist()
    assert found["test"].tolist() == np.flatnonzero(late[1]).tolist()
    assert (found["training"] == data.training_events()).all()
    assert abs(len(found["test"]) - held) <= 3  # equal times are not divided
    of_users = np.diff(data.bounds, axis=0)
    assert of_users.min() == 0  # some user has nothing in some split
    with pytest.raises(ValueError, match="held_out_share: expected times that differ"):
        RankingData(spoilt_log(log, ..., timestamps=lambda t: 0 * t), 9, 4, 3, 1000, 0.499)


def test_a_share_is_held_out_where_many_times_are_equal(log: EventLog) -> None:
    """Most events have the same time, at which the validation begins; one event is earlier."""
    times = 1 + (np.random.default_rng(0).random(log.num_events) > 0.6)
    for user in range(log.num_users):
        times[log.offsets[user] : log.offsets[user + 1]].sort()
    earliest = log.offsets[log.num_users // 2]
    times[earliest] = 0
    equal = spoilt_log(log, ..., timestamps=lambda _: times)
    data = RankingData(equal, 9, 4, held_out=3, user_buckets=1000, held_out_share=0.3)
    assert data.training_events().tolist() == [earliest]


def test_users_with_few_events_keep_some_to_train_on(tmp_path: Path) -> None:
    path = tmp_path / "ratings.dat"
    counts = (3, 4, 5, 9)
    path.write_text(
        "".join(
            f"{user}::{event + 1}::4::{1_000_000_000 + event}\n"
            for user, count in enumerate(counts, start=1)
            for event in range(count)
        )
    )
    data = RankingData(open_event_log(path), 5, 5, held_out=3, user_buckets=10)
    assert np.diff(data.bounds, axis=0)[1:].tolist() == [[1, 1, 2, 3]] * 2
    trained = np.bincount(data.user_of(data.training_events())).tolist()
    assert trained == [1, 2, 1, 3]


def test_a_batch_against_the_log(data: RankingData) -> None:
    log, windows = data.log, data.windows("training")
    chosen = windows.take(np.array([3, 0, len(windows) - 1]))
    batch = data.batch(chosen)
    check_ranking_batch(batch, data.sizes, 8, 3 + 18 + 4)
    rows = chosen.lengths
    assert batch.total == rows.sum()
    history, targets = batch.history_offsets.tolist(), batch.target_offsets.tolist()
    for number in range(3):
        start, request, end = (
            int(column[number]) for column in (chosen.starts, chosen.requests, chosen.ends)
        )
        of_history = slice(history[number], history[number + 1])
        of_targets = slice(targets[number], targets[number + 1])
        assert batch.history_items[of_history].tolist() == log.items[start:request].tolist()
        assert batch.history_actions[of_history].tolist() == data.bits[start:request].tolist()
        assert batch.target_items[of_targets].tolist() == log.items[request:end].tolist()
        assert batch.target_actions[of_targets].tolist() == data.bits[request:end].tolist()
        assert rows[number] == 3 + 2 * (request - start) + end - request
        user = int(chosen.users[number])
        before = request - int(log.offsets[user])
        hour = int(log.timestamps[request]) % 86_400 // 3600
        assert batch.contexts[number].tolist() == [user, int(math.log2(before + 1)), hour]
        assert int(batch.request_timestamps[number]) == log.timestamps[request]


def test_users_share_buckets(log: EventLog) -> None:
    data = RankingData(log, 9, 4, 3, user_buckets=7)
    rows = data.batch(data.windows("test")).contexts[:, 0]
    assert data.sizes["user"] == 7
    assert rows.min() >= 0
    assert rows.max() < 7
    assert len(rows.unique()) >= 4
    assert (rows == torch.from_numpy(data.user_rows(np.arange(log.num_users)))).all()


def test_ratings_are_actions(tmp_path: Path) -> None:
    logs = (
        open_event_log(write_synthetic_movielens(tmp_path / "movielens", 30, 100, 24)),
        open_event_log(write_synthetic_amazon(tmp_path / "amazon", **SIZE)),
    )
    for log in logs:
        data = RankingData(log, 9, 4, 3, 1000)
        assert data.actions == RATING_ACTIONS
        for bit, level in enumerate((2, 3, 4, 5)):
            assert ((data.bits >> bit & 1) == (np.asarray(log.ratings) >= level)).all()


def test_a_malformed_batch_is_named(data: RankingData) -> None:
    batch = data.batch(data.windows("validation"))

    def refused(message: str, **changes: Tensor) -> None:
        spoilt = dataclasses.replace(batch, **changes)
        with pytest.raises(ValueError, match=message):
            check_ranking_batch(spoilt, data.sizes, 8, 3 + 18 + 4)

    def with_value(name: str, place: Any, value: int) -> dict[str, Tensor]:
        tensor = getattr(batch, name).clone()
        tensor[place] = value
        return {name: tensor}

    last = data.sizes["item"] - 1
    refused(
        f"target_items: expected 0 to {last}, got -1 in row 7",
        **with_value("target_items", 7, -1),
    )
    refused("history_items: expected .* in row 2", **with_value("history_items", 2, last + 1))
    refused(
        "history_actions: expected 0 to 255, got 256 in row 4",
        **with_value("history_actions", 4, 256),
    )
    refused(
        r"contexts \(hour\): expected 0 to 23, got 24 in row 5",
        **with_value("contexts", (5, 2), 24),
    )
    refused(r"contexts: expected shape \(batch, 3\), got \(30, 2\)", contexts=batch.contexts[:, :2])
    late = int(batch.request_timestamps[1]) + 1
    first = int(batch.history_offsets[1])
    refused(
        f"history_timestamps: expected none after the request, got {late} in row {first}",
        **with_value("history_timestamps", first, late),
    )
    refused("target_offsets: expected values from 0 to 90", **with_value("target_offsets", -1, 91))
    refused(
        "history_offsets: expected .* not decrease, got 0 in row 3",
        **with_value("history_offsets", 3, 0),
    )
    refused("target_actions: expected int64 of shape", target_actions=batch.target_actions[1:])
    refused(
        "target_actions: expected int64 .* got torch.float32",
        target_actions=batch.target_actions.float(),
    )
    with pytest.raises(
        ValueError, match="rows of a sequence: expected at most 23, got 24 in row 0"
    ):
        check_ranking_batch(batch, data.sizes, 8, 23)


def endless(lengths: np.ndarray[Any, Any], rank: int, num_ranks: int) -> EndlessBatches:
    cost = AttentionCost(per_row=10, per_pair=1)
    return EndlessBatches(
        BalancedBatchSampler(lengths, cost, 8, num_ranks=num_ranks, rank=rank, seed=3)
    )


def test_batches_are_continued_exactly() -> None:
    lengths = torch.randint(1, 50, (45,)).numpy()
    drawn = endless(lengths, 0, 1)
    batches = [next(drawn).tolist() for _ in range(17)]
    assert drawn.batches_per_epoch == 6
    assert drawn.state_dict() == {"epoch": 2, "batch": 5}
    for epoch in (batches[:6], batches[6:12]):
        assert sorted(index for batch in epoch for index in batch) == list(range(45))
    assert batches[:6] != batches[6:12]
    for done in range(17):
        before, after = endless(lengths, 0, 1), endless(lengths, 0, 1)
        for _ in range(done):
            next(before)
        after.load_state_dict(before.state_dict())
        assert [next(after).tolist() for _ in range(17 - done)] == batches[done:]


def test_ranks_share_each_batch() -> None:
    lengths = torch.randint(1, 50, (45,)).numpy()
    ranks = [endless(lengths, rank, 3) for rank in range(3)]
    alone = endless(lengths, 0, 1)
    for _ in range(8):
        shares = [next(rank).tolist() for rank in ranks]
        assert sorted(index for share in shares for index in share) == sorted(next(alone).tolist())


# --- the model -----------------------------------------------------------------------------------


def spoilt_log(log: EventLog, events: np.ndarray[Any, Any], **columns: Any) -> EventLog:
    """Copies the log with changed values in some events."""
    copy = object.__new__(EventLog)
    copy.__dict__.update(log.__dict__)
    copy.columns = dict(log.columns)
    for name, value in columns.items():
        array = np.array(copy.columns[name] if name in copy.columns else getattr(log, name))
        array[events] = value(array[events])
        if name in copy.columns:
            copy.columns[name] = array
        else:
            setattr(copy, name, array)
    return copy


@pytest.mark.parametrize("split", ["training", "test"])
@pytest.mark.parametrize("group", [1, 2])
def test_nothing_of_the_future_is_seen(data: RankingData, split: Split, group: int) -> None:
    """A candidate's logits depend, to the bit, neither on its own action nor on later events;
    they do depend on earlier events.
    """
    model = small_model(data, target_group_size=group)
    log = data.log
    windows = data.windows(split)
    windows = windows.take(np.flatnonzero(windows.requests - windows.starts >= 4))
    # One window of each user: its future is the history of the next.
    windows = windows.take(np.unique(windows.users, return_index=True)[1])

    def logits(changed: EventLog) -> Tensor:
        other = RankingData(changed, 9, 4, 3, 1000)
        with torch.no_grad():
            return model(other.batch(windows))

    def flipped(bits: Any) -> Any:
        return bits ^ 0xFF

    def another(items: Any) -> Any:
        return (items + 1) % log.num_items

    expected = logits(log)
    offsets = np.concatenate([[0], np.cumsum(windows.ends - windows.requests)])
    most = int((windows.ends - windows.requests).max())
    assert most >= 3
    for place in range(most):
        own = windows.requests + place
        keep = own < windows.ends
        after = [
            np.arange(a + 1, log.offsets[u + 1]) for a, u in zip(own, windows.users, strict=True)
        ]
        future = np.concatenate([run for run, kept in zip(after, keep, strict=True) if kept])
        changed = spoilt_log(log, own[keep], actions=flipped)
        changed = spoilt_log(
            changed, future, actions=flipped, items=another, timestamps=lambda t: t + 9_999_999
        )
        rows = (offsets[:-1] + place)[keep]
        assert torch.equal(logits(changed)[rows], expected[rows])

    def differs(events: np.ndarray[Any, Any], **columns: Any) -> np.ndarray[Any, Any]:
        difference = logits(spoilt_log(log, events, **columns)) - expected
        return (difference != 0).any(dim=1).numpy()

    assert differs(windows.requests - 1, actions=flipped).all()
    assert differs(windows.starts, items=another).all()
    assert differs(windows.requests, items=another)[offsets[:-1]].all()  # the candidate itself
    # A candidate sees the one before it in its group, and none outside of its group.
    second = (windows.ends - windows.requests) > 1
    seen = differs(windows.requests[second], items=another)[(offsets[:-1] + 1)[second]]
    assert seen.all() if group == 2 else not seen.any()


def test_logits_do_not_depend_on_the_rest_of_the_batch(data: RankingData) -> None:
    model = small_model(data)
    windows = data.windows("training")
    with torch.no_grad():
        together = model(data.batch(windows))
        alone = [
            model(data.batch(windows.take(np.array([number])))) for number in range(len(windows))
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert together.std(dim=0).min() > 0.05


def test_the_context_and_the_time_matter(data: RankingData) -> None:
    model = small_model(data)
    batch = data.batch(data.windows("test"))
    with torch.no_grad():
        expected = model(batch)
        for column in range(len(CONTEXTS)):
            contexts = batch.contexts.clone()
            contexts[:, column] = (contexts[:, column] + 1) % data.sizes[CONTEXTS[column]]
            changed = model(dataclasses.replace(batch, contexts=contexts))
            assert (changed - expected).abs().amax() > 1e-3
        long_ago = batch.history_timestamps - 10_000_000
        changed = model(dataclasses.replace(batch, history_timestamps=long_ago))
        assert (changed - expected).abs().amax() > 1e-3


def test_windows_without_history(data: RankingData) -> None:
    """Logits and gradients are those of each window alone, and no action is read."""
    windows = data.windows("training")
    first = windows.take(np.flatnonzero(windows.requests == windows.starts))
    assert len(first) >= 5
    model = small_model(data)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def results(windows: RankingWindows, cotangent: Tensor) -> list[Tensor]:
        logits = model(data.batch(windows))
        gradients = torch.autograd.grad(logits, parameters, cotangent)
        return [logits.detach(), *gradients]

    cotangent = torch.randn(int((first.ends - first.requests).sum()), 2)
    parts = cotangent.split((first.ends - first.requests).tolist())
    alone = [results(first.take(np.array([n])), part) for n, part in enumerate(parts)]
    logits, *gradients = results(first, cotangent)
    wanted, *sums = zip(*alone, strict=True)
    torch.testing.assert_close(logits, torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert logits.std(dim=0).min() > 0.05
    for name, gradient, each in zip(names, gradients, sums, strict=True):
        total = torch.stack(each).double().sum(0)
        assert (gradient - total).norm() <= 1e-4 * total.norm(), name
        assert gradient.any() != name.startswith("action."), name


def test_loss_and_labels(data: RankingData) -> None:
    model = small_model(data, tasks=("long_view", "is_click"))
    batch = data.batch(data.windows("training"))
    labels = task_labels(model.config, batch.target_actions)
    assert (labels[:, 0] == (batch.target_actions >> 6 & 1)).all()
    assert (labels[:, 1] == (batch.target_actions & 1)).all()
    logits = model(batch)
    weights = torch.tensor([0.3, 2.0])
    probabilities = logits.double().sigmoid()
    likelihood = torch.where(labels.bool(), probabilities, 1 - probabilities)
    expected = -(likelihood.log() @ weights.double())
    losses = ranking_loss(logits, labels, weights)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_bf16_layers_have_fp32_weights(data: RankingData) -> None:
    exact = small_model(data)
    rounded = RankingModel(exact.config, torch.bfloat16).eval()
    rounded.load_state_dict(exact.state_dict())
    batch = data.batch(data.windows("test"))
    expected, logits = exact(batch), rounded(batch)
    assert logits.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in rounded.parameters())
    error = F.mse_loss(logits, expected).sqrt() / expected.std()
    assert 1e-5 < error < 0.1


def test_a_model_in_a_file(data: RankingData, tmp_path: Path) -> None:
    model = small_model(data)
    save_ranking_model(tmp_path / "best.pt", model)
    read = load_ranking_model(tmp_path / "best.pt", CPU)
    batch = data.batch(data.windows("test"))
    assert torch.equal(read(batch), model(batch))
    assert isinstance(read.config.layer, HSTULayerConfig)
    with pytest.raises(ValueError, match=r"best\.pt is not a model that train_retrieval\.py"):
        load_model(tmp_path / "best.pt", CPU)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is not a model that train_ranking\.py"):
        load_ranking_model(tmp_path / "other.pt", CPU)
