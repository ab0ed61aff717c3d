"""Tests of recipes: each is trained for some steps on a small synthetic file in its layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import train_retrieval
from recommender.recipes import RECIPES
from recommender.saved import load_model

from hstu_attn.data.synthetic import synthetic_events, write_synthetic_movielens

NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
PUBLISHED = {  # HR@10 and NDCG@200
    "sasrec-ml-1m": (0.2853, 0.2498),
    "hstu-ml-1m": (0.3097, 0.2606),
    "hstu-large-ml-1m": (0.3294, 0.2771),
    "sasrec-ml-20m": (0.2889, 0.2527),
    "hstu-ml-20m": (0.3273, 0.2787),
    "hstu-large-ml-20m": (0.3556, 0.2965),
    "sasrec-books": (0.0306, 0.0362),
    "hstu-books": (0.0416, 0.0461),
    "hstu-large-books": (0.0478, 0.0517),
}
UNPUBLISHED = {"sasrec-ml-100k", "hstu-ml-100k"}
SHAPES = {  # width, layers, heads, rows, epochs, negatives
    "sasrec-ml-100k": (64, 4, 2, 200, 60, 128),
    "hstu-ml-100k": (64, 4, 2, 200, 60, 128),
    "sasrec-ml-1m": (50, 2, 1, 200, 101, 128),
    "hstu-ml-1m": (50, 2, 1, 200, 101, 128),
    "hstu-large-ml-1m": (50, 8, 2, 200, 101, 128),
    "sasrec-ml-20m": (256, 4, 4, 200, 101, 128),
    "hstu-ml-20m": (256, 4, 4, 200, 101, 128),
    "hstu-large-ml-20m": (256, 16, 8, 200, 101, 128),
    "sasrec-books": (64, 4, 4, 50, 201, 512),
    "hstu-books": (64, 4, 4, 50, 201, 512),
    "hstu-large-books": (64, 16, 8, 50, 201, 512),
}
FEW = ["--steps", "2", "--device", "cpu", "--no-baselines"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The path of a small file of each layout, by the last part of a recipe's name."""
    directory = tmp_path_factory.mktemp("data")
    users, items, events = 140, 100, 20
    found = {"ml-1m": write_synthetic_movielens(directory / "1m", users, items, events)}
    found["ml-20m"] = directory / "ratings.csv"
    found["books"] = directory / "ratings_Books.csv"
    made = list(synthetic_events(users, items, events, seed=0))
    found["ml-100k"] = directory / "u.data"
    tabs = [f"{user + 1}\t{item + 1}\t{rating}\t{time}" for user, item, rating, time in made]
    found["ml-100k"].write_text("\n".join(tabs) + "\n")
    csv, books = (
        [f"{user + 1},{item + 1},{rating}.5,{time}" for user, item, rating, time in made],
        [f"A{user:013},{item:010},{rating}.0,{time}" for user, item, rating, time in made],
    )
    found["ml-20m"].write_text("\n".join(["userId,movieId,rating,timestamp", *csv]) + "\n")
    rare = ["A9999999999999,0000000001,5.0,1300000000", "A0000000000001,9999999999,5.0,1300000000"]
    found["books"].write_text("\n".join([*books, *rare]) + "\n")
    return found


def test_there_are_the_recipes_of_the_published_table() -> None:
    assert set(NAMES) == {*PUBLISHED, *UNPUBLISHED}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_says(name: str) -> None:
    options = train_retrieval.parse_arguments(["--recipe", name])
    width, layers, heads, rows, epochs, negatives = SHAPES[name]
    assert (options.dim, options.layers, options.heads) == (width, layers, heads)
    assert (options.max_seq_len, options.epochs, options.negatives) == (rows, epochs, negatives)
    if options.model == "hstu":
        assert options.dim_per_head in (width // heads, (width // heads) // 8 * 8)
    else:
        assert options.head_dim is None
    assert options.dropout == (0.5 if "books" in name or name in UNPUBLISHED else 0.2)
    batch = 128 if name in PUBLISHED else 32
    assert (options.sequences_per_batch, options.tokens_per_batch) == (batch, None)
    rate = (1e-3, "constant", 0) if name in PUBLISHED else (2e-3, "cosine", 100)
    assert (options.learning_rate, options.schedule, options.warmup_steps) == rate
    assert (options.clip_norm, options.weight_decay) == (0, 0)
    assert options.temperature == (0.05 if name in PUBLISHED else 0.1)
    assert options.negatives_per == "row"
    assert (options.similarity, options.exclude) == ("cosine", "window")
    protocol = "published" if name in PUBLISHED else "validated"
    assert (options.protocol, options.eval_every) == (protocol, "epoch")
    fewest = 5 if "books" in name else 1
    assert (options.min_user_events, options.min_item_events) == (fewest, fewest)
    if name in PUBLISHED:
        assert (options.published["HR@10"], options.published["NDCG@200"]) == PUBLISHED[name]
        assert list(options.published) == list(train_retrieval.LABELS.values())[:6]
    else:
        assert options.published == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains(
    name: str, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe trains on small data in its layout; the published row is printed last."""
    source = next(path for suffix, path in data.items() if name.endswith(suffix))
    paths = ["--data", str(source), "--out", str(tmp_path / "run")]
    assert train_retrieval.main([*FEW, "--recipe", name, *paths]) == 0
    printed = capsys.readouterr().out
    assert "events of 140 users on " in printed
    table = [line for line in printed.splitlines() if "last epoch" in line or "published" in line]
    if name in PUBLISHED:
        assert table[0].startswith("SASRec, last" if "sasrec" in name else "HSTU, last")
        hit_rate, ndcg = PUBLISHED[name]
        words = table[-1].split()
        assert words[:2] == ["published", f"{hit_rate:.4f}"]
        assert words[-2:] == [f"{ndcg:.4f}", "-"]  # no MRR is published
    losses = json.loads((tmp_path / "run" / "history.json").read_text())["losses"]
    assert len(losses) == 2
    if name == "hstu-ml-1m":
        saved = load_model(tmp_path / "run" / "best.pt", torch.device("cpu"))
        assert saved.model.config.hidden_dim == 48


def test_a_copy_is_changed_and_the_command_line_overrides(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(shutil.copy(RECIPES / "hstu-ml-1m.toml", tmp_path / "mine.toml"))
    text = mine.read_text().replace("layers = 2", "layers = 1\nbaselines = false\nbf16 = true")
    assert text.count("layers = 1") == 1
    mine.write_text(f'data = ["{data["ml-1m"]}"]\n{text}')
    more = ["--dim", "24", "--tokens-per-batch", "400", "--no-bf16", "--protocol", "validated"]
    for order in ([*more, "--recipe", str(mine)], ["--recipe", str(mine), *more]):
        options = train_retrieval.parse_arguments(order)
        assert (options.layers, options.dim, options.head_dim) == (1, 24, 48)
        assert (options.tokens_per_batch, options.sequences_per_batch) == (400, None)
        assert (options.bf16, options.baselines) == (False, False)
        assert options.data == [data["ml-1m"]]
    out = tmp_path / "run"
    first = ["--recipe", str(mine), "--steps", "2", "--device", "cpu", "--out", str(out)]
    assert train_retrieval.main([*first, *more]) == 0
    assert "HSTU " in capsys.readouterr().out

    # Options may come from the recipe or from the command line: the run is the same.
    same = ["--dim", "24", "--layers", "1", "--head-dim", "48", "--max-seq-len", "200"]
    same += ["--epochs", "101", "--learning-rate", "1e-3", "--schedule", "constant"]
    same += ["--warmup-steps", "0", "--clip-norm", "0", "--heads", "1", "--temperature", ".05"]
    same += ["--negatives", "128", "--negatives-per", "row", "--exclude", "window"]
    same += ["--ties", "quicksort"]
    same += ["--eval-every", "epoch", "--checkpoint-every", "epoch", "--tokens-per-batch", "400"]
    same += ["--data", str(data["ml-1m"]), *FEW, "--out", str(out), "--resume"]
    assert train_retrieval.main(same) == 0
    assert "Continuing after step 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dimm = 5", "expected names of options, without their leading dashes; got dimm"),
        ("head_dim = 48", "without their leading dashes; got head_dim"),
        ('recipe = "hstu-ml-1m"', "without their leading dashes; got recipe"),
        ("dim = ", "Invalid value"),
        ("published = 5", "published: expected a table of metrics, got 5"),
        ("[published]\nHR = 0.5", "[published]: expected any of HR@10, NDCG@10, "),
        ('[published]\n"HR@10" = "high"', "[published] HR@10: expected a number, got 'high'"),
        ("dim = 5.5", "argument --dim: invalid int value: '5.5'"),
        ("dim = -64", "--dim must be positive, got -64"),
        ("dim = true", "argument --dim: expected one argument"),
        ("bf16 = 5", "argument --bf16/--no-bf16: ignored explicit argument '5'"),
        ('protocol = "sound"', "argument --protocol: invalid choice: 'sound'"),
    ],
)
def test_a_wrong_recipe_is_said_at_once(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        train_retrieval.parse_arguments(["--recipe", str(path)])
    assert message in capsys.readouterr().err


def test_an_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_retrieval.parse_arguments(["--recipe", "hstu-ml-2m"])
    message = "--recipe hstu-ml-2m: expected a file, or one of hstu-books, hstu-large-books, "
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_seeds_are_summarized_beside_the_published_row(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--data", str(data["ml-1m"]), "--out", str(tmp_path / "run")]
    assert train_retrieval.main([*FEW, "--recipe", "hstu-ml-1m", "--seeds", "2", *paths]) == 0
    last = capsys.readouterr().out.split("Of 2 seeds")[1]
    rows = [line.split("  ")[0] for line in last.splitlines() if line]
    assert rows[-5:] == [
        "HSTU, last epoch, mean",
        "HSTU, last epoch, standard deviation",
        "HSTU, best epoch, mean",
        "HSTU, best epoch, standard deviation",
        "published",
    ]
