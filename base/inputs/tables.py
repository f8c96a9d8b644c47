"""Datasets in parquet: files of the user, and the hub's own parquet copy of each of its datasets."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.system.files import open_file
from config import DataError, DatasetConfig

if TYPE_CHECKING:
    import pyarrow

PARQUET_BRANCH = "refs/convert/parquet"  # here the hub keeps each dataset as SUBSET/SPLIT/0000.parquet, 0001, ...


class Table:
    """The rows of parquet files, one file after the other; a field that a file lacks is None in its rows. They stay in
    their columns: these are far smaller than the rows as dicts. DataError if a file cannot be read."""

    def __init__(self, name: str, files: Sequence[str | Path]):
        import pyarrow.parquet  # on demand: only parquet needs it

        for file in files:
            with open_file(file):  # pyarrow does not say why it cannot open a file
                pass
        try:
            tables = [pyarrow.parquet.read_table(file, memory_map=True) for file in files]
            self.table = pyarrow.concat_tables(tables, promote_options="default")
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{name}: cannot be read as parquet ({error})") from error
        self.num_bytes: int = self.table.nbytes

    def __len__(self) -> int:
        return len(self.table)

    def read(self, number: int) -> dict:
        import pyarrow

        one = self.table.slice(number, 1)
        try:
            (row,) = one.to_pylist(maps_as_pydicts="strict")
        except (KeyError, ValueError, OverflowError, pyarrow.ArrowException):
            return _readable(one)
        return row


class TableRow(dict):
    """A row of a table of which Python cannot hold some columns: to read one of them raises DataError."""

    def __init__(self, values: dict, unreadable: dict[str, str]):
        super().__init__(values)
        self.unreadable = unreadable

    def __missing__(self, column: str) -> Any:
        if column in self.unreadable:
            raise DataError(self.unreadable[column])
        raise KeyError(column)

    def __contains__(self, column: str) -> bool:
        return super().__contains__(column) or column in self.unreadable

    def get(self, column: str, default: Any = None) -> Any:
        return self[column] if column in self else default


def _readable(one: "pyarrow.Table") -> TableRow:
    """The only row of a table: nanoseconds, dates out of range and bytes that are no text cannot be values here."""
    values = {}
    unreadable = {}
    for column in one.column_names:
        try:
            (values[column],) = one.column(column).to_pylist(maps_as_pydicts="strict")
        except (KeyError, ValueError, OverflowError) as error:  # ArrowInvalid is a ValueError
            unreadable[column] = f"column {column!r} cannot be read ({error}): convert it, or name another key"
    return TableRow(values, unreadable)


def hub_files(name: str, cfg: DatasetConfig) -> list[Path]:
    """The files of a dataset of the hub, one subset after the other. Fetches them."""
    instead = "or download it elsewhere and give its file: data_path=FILE, .jsonl, .json or .parquet"
    subsets = ["default"]
    if cfg.subset:
        subsets = [subset or "default" for subset in cfg.subset.split("+")]
    folders = [f"{subset}/{cfg.split or 'train'}" for subset in subsets]
    patterns = [f"{folder}/*.parquet" for folder in folders]
    problem = f"data_path: '{name}' is not a local file"
    from base.system.hub import download  # local files need no network library

    copy = download(name, patterns, problem, f"check its name, {instead}", "dataset", PARQUET_BRANCH)
    files = []
    for folder in folders:
        files_of_folder = sorted(copy.glob(f"{folder}/*.parquet"))
        if not files_of_folder:
            raise DataError(
                f"data_path: '{name}' has no {folder} in the hub's parquet copy of it (branch {PARQUET_BRANCH}): set "
                f"subset and split to a folder that is there, {instead}"
            )
        files += files_of_folder
    return files
