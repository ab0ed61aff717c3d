"""Made-up data sets in the layouts of Amazon reviews and of KuaiRand's logs.

Their users behave like those of `hstu_attn.data.synthetic`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal, TextIO

from .synthetic import FIRST_TIMESTAMP, synthetic_events, write_whole

__all__ = ["write_synthetic_amazon", "write_synthetic_kuairand"]

DAY = 86_400
AMAZON_START = 1_420_070_400  # 2015

CAPITALS_AND_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

BEIJING = timezone(timedelta(hours=8))
KUAIRAND_START, KUAIRAND_SPLIT, KUAIRAND_END = (
    1000 * int(datetime(2022, month, day, tzinfo=BEIJING).timestamp())
    for month, day in ((4, 8), (4, 22), (5, 9))
)
KUAIRAND_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,"
    "long_view,play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,"
    "tab"
)
PATIENCE_SPREAD = 0.7  # deviation of the logarithm of a video's length
CLICK_MS, LONG_VIEW_MS = 7_000, 18_000  # played at least this long, or to the end


def write_synthetic_amazon(
    directory: str | Path,
    year: Literal[2018, 2023] = 2023,
    num_users: int = 2000,
    num_items: int = 1000,
    mean_events: int = 90,
    seed: int = 0,
    compress: bool = False,
) -> Path:
    """Writes `Synthetic.csv` into `directory`, whole or not at all.

    Args:
        directory: created if absent.
        year: the year of the layout. The layout of 2018 has no header, and all its timestamps are
            at midnight.
        num_users: reviewers.
        num_items: products; some may have no review.
        mean_events: reviews per user, on average; each user has at least 20.
        seed: the same arguments write the same file.
        compress: writes `Synthetic.csv.gz`.

    Returns:
        The path of the file.

    Raises:
        ValueError: another year, more items, or more events per user, than can be made.
    """
    if year not in (2018, 2023):
        raise ValueError(f"year: expected 2018 or 2023, got {year}")
    generator = random.Random(seed)
    user_length = {2018: 13, 2023: 26}[year]
    users = _different("A" if year == 2018 else "AE", user_length, num_users, generator)
    items = _different("B0", 8, num_items, generator)
    events = synthetic_events(num_users, num_items, mean_events, seed)

    def write(file: TextIO) -> None:
        if year == 2023:
            file.write("user_id,parent_asin,rating,timestamp\n")
        for user, item, rating, time in events:
            seconds = AMAZON_START + time - FIRST_TIMESTAMP
            if year == 2018:
                file.write(f"{items[item]},{users[user]},{rating}.0,{seconds - seconds % DAY}\n")
            else:
                milliseconds = 1000 * seconds + generator.randrange(1000)
                file.write(f"{users[user]},{items[item]},{rating}.0,{milliseconds}\n")

    path = Path(directory) / ("Synthetic.csv.gz" if compress else "Synthetic.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)
    return path


def _different(prefix: str, length: int, count: int, generator: random.Random) -> list[str]:
    """Makes distinct ids."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[prefix + "".join(generator.choices(CAPITALS_AND_DIGITS, k=length))] = None
    return list(found)


def write_synthetic_kuairand(
    directory: str | Path,
    num_users: int = 2000,
    num_items: int = 1000,
    mean_events: int = 90,
    seed: int = 0,
    compress: bool = False,
) -> list[Path]:
    """Writes the two logs of a made-up KuaiRand data set into `directory`.

    The logs are `log_standard_4_08_to_4_21_synthetic.csv` and
    `log_standard_4_22_to_5_08_synthetic.csv`; each is written whole or not at all. A video that is
    liked better is played longer, and each user has a video length that suits them best.

    Args:
        directory: created if absent.
        num_users: users.
        num_items: videos; some may never be shown.
        mean_events: videos shown to a user, on average; each user is shown at least 20.
        seed: the same arguments write the same files.
        compress: writes `.csv.gz`.

    Returns:
        The paths of both files.

    Raises:
        ValueError: more items, or more events per user, than can be made.
    """
    events = list(synthetic_events(num_users, num_items, mean_events, seed))
    generator = random.Random(seed)
    durations = [round(1000 * generator.lognormvariate(3.5, 0.8)) for _ in range(num_items)]
    preferred = [1000 * generator.lognormvariate(3.5, 0.8) for _ in range(num_users)]
    latest = max(time for *_, time in events) - FIRST_TIMESTAMP + 1
    pace = (KUAIRAND_END - KUAIRAND_START) / latest  # milliseconds for a second
    lines: tuple[list[str], list[str]] = ([], [])
    for user, item, rating, time in events:
        time_ms = KUAIRAND_START + int((time - FIRST_TIMESTAMP) * pace)
        apart = math.log(durations[item] / preferred[user])
        liking = 0.5 + (rating - 0.5) * math.exp(-((apart / PATIENCE_SPREAD) ** 2))
        line = _shown(user, item, liking, time_ms, durations[item], generator)
        lines[time_ms >= KUAIRAND_SPLIT].append(line)

    def writer(part: list[str]) -> Callable[[TextIO], None]:
        return lambda file: file.writelines([KUAIRAND_HEADER + "\n", *part])

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for dates, part in zip(("4_08_to_4_21", "4_22_to_5_08"), lines, strict=True):
        name = f"log_standard_{dates}_synthetic.csv" + (".gz" if compress else "")
        paths.append(directory / name)
        write_whole(paths[-1], writer(part))
    return paths


def _shown(
    user: int, item: int, liking: float, time_ms: int, duration_ms: int, generator: random.Random
) -> str:
    """Returns the line of a video that was shown to a user, whose liking of it is 0.5 to 5."""

    def happens(probability: float) -> int:
        return int(generator.random() < probability)

    at = datetime.fromtimestamp(time_ms / 1000, BEIJING)
    play_ms = round(duration_ms * generator.betavariate(liking, 6 - liking) * 1.3)
    liked, disliked = liking >= 3, liking < 1
    columns = {
        "is_click": int(play_ms >= duration_ms or play_ms > CLICK_MS),
        "is_like": happens(0.3 if liked else 0.01),
        "is_follow": happens(0.05 if liked else 0.0),
        "is_comment": happens(0.03),
        "is_forward": happens(0.02 if liked else 0.0),
        "is_hate": happens(0.1 if disliked else 0.0),
        "long_view": int(play_ms >= min(duration_ms, LONG_VIEW_MS)),
        "play_time_ms": play_ms,
        "duration_ms": duration_ms,
        "profile_stay_time": 0,
        "comment_stay_time": 0,
        "is_profile_enter": happens(0.02 if liked else 0.0),
        "is_rand": 0,
        "tab": 1,
    }
    values = (user, item, f"{at:%Y%m%d}", 100 * at.hour, time_ms, *columns.values())
    return ",".join(map(str, values)) + "\n"
