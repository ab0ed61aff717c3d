"""Writes a made-up data set in the layout of MovieLens 1M: `ratings.dat` and `movies.dat`.

Its viewers behave like this, so that there is something to learn:

* Films have one or two genres, a year, and a popularity that falls off as a power of their rank.
  Some belong to a series.
* A viewer has a taste in genres and a favorite period. The taste drifts: toward what is watched,
  and now and then to something new.
* Viewing comes in sessions, days apart. A session has a genre, drawn from the taste or carried over
  from the last one, and wanders through the years of that genre, forward or backward at its own
  pace, starting from about the favorite period. Each film is of the session's genre and from about
  the year reached, more likely a well-known film; or the sequel of the last film; or a popular film
  of any genre. No film is seen twice.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

__all__ = ["FIRST_TIMESTAMP", "synthetic_events", "write_synthetic_movielens", "write_whole"]


def _words(text: str) -> list[str]:
    return text.split()


GENRES = _words(
    "Drama Comedy Action Thriller Romance Horror Adventure Sci-Fi Children's Crime War "
    "Documentary Musical Mystery Animation Fantasy Western Film-Noir"
)
ADJECTIVES = _words(
    "Silent Broken Crimson Distant Hidden Golden Restless Frozen Burning Secret Lonely Electric "
    "Midnight Paper Velvet Wandering Hollow Savage Gentle Forgotten Invisible Wicked Northern "
    "Borrowed Endless Stolen Painted Iron Glass Scarlet Honest Tangled Fallen Bitter Lucky Quiet"
)
NOUNS = _words(
    "River Garden Letter Harbour Winter Stranger Crown Mirror Orchard Station Promise Shadow "
    "Voyage Lantern Island Empire Witness Carnival Summer Bridge Detective Orchestra Highway "
    "Kingdom Valley Train Circus Outlaw Machine Daughter Hotel Forest Game Planet Soldier Waltz"
)
ROMAN = ("", " II", " III", " IV")

FIRST_YEAR, LAST_YEAR = 1930, 2000
FIRST_TIMESTAMP = 956_700_000  # April 2000
DAY, MINUTE = 86_400, 60
FEWEST_EVENTS = 20  # the minimum for each viewer, as in MovieLens

POPULARITY_EXPONENT = 0.8
SERIES_PROBABILITY = 0.04  # a new title begins a series
GENRE_EXPONENT = 0.7
SEQUEL_PROBABILITY = 0.5  # a film that has a sequel is followed by it
POPULAR_PROBABILITY = 0.2  # whatever the session's genre
CARRY_OVER_PROBABILITY = 0.3
SESSION_END_PROBABILITY = 0.1
NEW_INTEREST_PROBABILITY = 0.1  # a session begins a new interest
FASTEST_PACE = 5.0  # years from one film to the next
YEAR_SPREAD = 1.5
PERIOD_SPREAD = 12.0
DAYS_BETWEEN_SESSIONS = 9
ATTEMPTS = 12


@dataclass(frozen=True)
class _Film:
    title: str
    genres: tuple[int, ...]
    year: int
    weight: float
    quality: float
    sequel: int | None


class _Catalog:
    """The films, and ways to draw one."""

    def __init__(self, films: list[_Film]) -> None:
        self.films = films
        self._cumulative = list(itertools.accumulate(film.weight for film in films))
        self._by_genre = [
            sorted(
                (index for index, film in enumerate(films) if genre in film.genres),
                key=lambda index: films[index].year,
            )
            for genre in range(len(GENRES))
        ]
        self._years = [[films[index].year for index in members] for members in self._by_genre]

    def draw(self, generator: random.Random) -> int:
        """Draws any film, by popularity."""
        return bisect(self._cumulative, generator.random() * self._cumulative[-1])

    def draw_near(self, genre: int, year: float, generator: random.Random) -> int:
        """Draws two films of the genre from about the year; returns the better-known one."""
        members = self._by_genre[genre]
        if not members:
            return self.draw(generator)
        chosen = []
        for _ in range(2):
            place = bisect(self._years[genre], generator.gauss(year, YEAR_SPREAD))
            chosen.append(
                members[min(max(place - 1 + generator.randrange(2), 0), len(members) - 1)]
            )
        return max(chosen, key=lambda index: self.films[index].weight)


@dataclass
class _Session:
    """The genre, and the way through its years, that a viewer currently follows."""

    genre: int
    year: float
    pace: float

    @staticmethod
    def begin(genre: int, period: float, generator: random.Random) -> _Session:
        year = min(max(generator.gauss(period, PERIOD_SPREAD), FIRST_YEAR), LAST_YEAR)
        return _Session(genre, year, generator.uniform(-FASTEST_PACE, FASTEST_PACE))

    def advance(self) -> None:
        self.year += self.pace
        if not FIRST_YEAR <= self.year <= LAST_YEAR:
            self.pace = -self.pace
            self.year += 2 * self.pace


def write_synthetic_movielens(
    directory: str | Path,
    num_users: int = 2000,
    num_items: int = 1000,
    mean_events: int = 90,
    seed: int = 0,
) -> Path:
    """Writes a made-up `ratings.dat` and `movies.dat` into `directory`.

    Each file is written under another name first, and `ratings.dat` is renamed last, so an
    interrupted writer leaves no `ratings.dat`.

    Args:
        directory: created if absent.
        num_users: viewers.
        num_items: films; some may be seen by no viewer.
        mean_events: films seen per viewer, on average; each sees at least 20.
        seed: the same arguments write the same files.

    Returns:
        The path of `ratings.dat`.

    Raises:
        ValueError: more films, or more events per viewer, than can be made.
    """
    catalog, events = _simulate(num_users, num_items, mean_events, seed)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    def write_films(file: TextIO) -> None:
        for number, film in enumerate(catalog.films, start=1):
            genres = "|".join(GENRES[genre] for genre in film.genres)
            file.write(f"{number}::{film.title} ({film.year})::{genres}\n")

    def write_ratings(file: TextIO) -> None:
        for user, film, rating, timestamp in events:
            file.write(f"{user + 1}::{film + 1}::{rating}::{timestamp}\n")

    write_whole(directory / "movies.dat", write_films)
    write_whole(directory / "ratings.dat", write_ratings)
    return directory / "ratings.dat"


def synthetic_events(
    num_users: int, num_items: int, mean_events: int, seed: int
) -> Iterator[tuple[int, int, int, int]]:
    """Returns user, item, rating and timestamp of all events, user by user, oldest first.

    Users and items are numbers from 0. The arguments are those of `write_synthetic_movielens`.
    """
    return _simulate(num_users, num_items, mean_events, seed)[1]


def _simulate(
    num_users: int, num_items: int, mean_events: int, seed: int
) -> tuple[_Catalog, Iterator[tuple[int, int, int, int]]]:
    if not 0 < num_items <= len(ADJECTIVES) * len(NOUNS):
        raise ValueError(
            f"num_items: expected 1 to {len(ADJECTIVES) * len(NOUNS)}, got {num_items}"
        )
    if not FEWEST_EVENTS <= mean_events <= num_items // 4:
        raise ValueError(
            f"mean_events: expected {FEWEST_EVENTS} to a quarter of num_items = {num_items}, "
            f"got {mean_events}"
        )
    generator = random.Random(seed)
    catalog = _Catalog(_make_films(num_items, generator))

    def events() -> Iterator[tuple[int, int, int, int]]:
        for user in range(num_users):
            spread = generator.lognormvariate(-0.32, 0.8)  # its mean is 1
            count = FEWEST_EVENTS + round((mean_events - FEWEST_EVENTS) * spread)
            for event in _view(catalog, min(count, num_items // 2), generator):
                yield user, *event

    return catalog, events()


def write_whole(path: Path, write: Callable[[TextIO], None]) -> None:
    """Writes a file under another name and renames it; a name that ends in .gz compresses it."""
    temporary = path.with_name(path.name + ".tmp")
    if path.suffix == ".gz":
        # Without a name and a time in its header, the same text makes the same file.
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="latin-1", newline="\n") as file,
        ):
            write(file)
    else:
        with temporary.open("w", encoding="latin-1") as file:
            write(file)
    os.replace(temporary, path)


def _make_films(num_items: int, generator: random.Random) -> list[_Film]:
    names = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    generator.shuffle(names)
    genre_weights = [1 / (rank + 1) ** GENRE_EXPONENT for rank in range(len(GENRES))]
    weights = [1 / (rank + 5) ** POPULARITY_EXPONENT for rank in range(num_items)]
    generator.shuffle(weights)

    films: list[_Film] = []
    while len(films) < num_items:
        parts = generator.choice((2, 3, 4)) if generator.random() < SERIES_PROBABILITY else 1
        parts = min(parts, num_items - len(films))
        genres = tuple(dict.fromkeys(generator.choices(range(len(GENRES)), genre_weights, k=2)))
        year = round(generator.triangular(FIRST_YEAR, LAST_YEAR, LAST_YEAR - 8))
        name = names.pop()
        for part in range(parts):
            films.append(
                _Film(
                    title=f"The {name}{ROMAN[part]}",
                    genres=genres,
                    year=min(year + 2 * part, LAST_YEAR),
                    weight=weights[len(films)],
                    quality=generator.gauss(0, 0.5),
                    sequel=len(films) + 1 if part + 1 < parts else None,
                )
            )
    return films


def _view(
    catalog: _Catalog, num_events: int, generator: random.Random
) -> Iterator[tuple[int, int, int]]:
    """Yields one viewer's film, rating and timestamp, event by event."""
    genres = range(len(GENRES))
    taste = [generator.gammavariate(0.25, 1.0) for _ in genres]
    period = generator.triangular(FIRST_YEAR, LAST_YEAR, LAST_YEAR - 8)
    session = _Session.begin(generator.choices(genres, taste)[0], period, generator)
    now = FIRST_TIMESTAMP + generator.uniform(0, 365 * DAY)
    seen: set[int] = set()
    last: int | None = None
    for _ in range(num_events):
        if seen and generator.random() < SESSION_END_PROBABILITY:
            total = sum(taste)
            taste = [weight / total for weight in taste]
            taste[session.genre] += 0.15
            if generator.random() < NEW_INTEREST_PROBABILITY:
                taste[generator.randrange(len(GENRES))] += 0.5
            carried_over = generator.random() < CARRY_OVER_PROBABILITY
            genre = session.genre if carried_over else generator.choices(genres, taste)[0]
            session = _Session.begin(genre, period, generator)
            now += DAY / 3 + generator.expovariate(1 / (DAYS_BETWEEN_SESSIONS * DAY))
        session.advance()
        last = _next_film(catalog, session, last, seen, generator)
        seen.add(last)
        now += MINUTE / 2 + generator.expovariate(1 / (3 * MINUTE))
        film = catalog.films[last]
        liking = 3.3 + film.quality + 0.5 * (session.genre in film.genres)
        yield last, min(5, max(1, round(generator.gauss(liking, 0.8)))), int(now)


def _next_film(
    catalog: _Catalog,
    session: _Session,
    last: int | None,
    seen: set[int],
    generator: random.Random,
) -> int:
    """Draws an unseen film, for one of the three reasons in the module's docstring."""
    sequel = None if last is None else catalog.films[last].sequel
    if sequel is not None and sequel not in seen and generator.random() < SEQUEL_PROBABILITY:
        return sequel
    popular = generator.random() < POPULAR_PROBABILITY
    for _ in range(0 if popular else ATTEMPTS):
        film = catalog.draw_near(session.genre, session.year, generator)
        if film not in seen:
            return film
    while (film := catalog.draw(generator)) in seen:
        pass
    return film
