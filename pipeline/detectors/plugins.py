"""Plugins: detectors and procedures in users' files and in other packages.

A file is read once, on the driver, and sent to every worker as text, so that nodes need no shared disk. A module must
be installed on every node. In both cases its content is part of the fingerprint of its scores.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pipeline.config.paths import written
from pipeline.errors import ForeignError, UserError, error_line, foreign_as_errors

IMPORT_SECONDS = 120.0
"""Longest import of a plugin."""

GROUP = "seenset.detectors"
"""Entry point group of other packages: any name, with the module to import as its value."""

PACKAGE = "seenset_plugins"
"""Virtual package of the modules of plugin files; it does not exist on disk."""

BUILT_IN = "pipeline"
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A Python file, with its text, or an installed module."""

    name: str  # as in the setting `import`: my_detectors.py, or my_package.detectors
    source: str | None  # text of a file; None for a module

    @property
    def module(self) -> str:
        """The name of its loaded module."""
        return self.name if self.source is None else f"{PACKAGE}.{Path(self.name).stem}"

    @property
    def label(self) -> str:
        """Its name in fingerprints: the path of a file does not affect scores."""
        return self.name.split(".")[0] if self.source is None else Path(self.name).name

    def holds(self, module: str) -> bool:
        """Whether a module belongs to this plugin; for an installed module, to its package."""
        return module == self.module or (self.source is None and module.split(".")[0] == self.label)


class Registry(dict[str, Entry]):
    """Registered names for configurations, and the module that registered each."""

    def __init__(self, kind: str) -> None:
        """`kind` is the name of an entry in errors."""
        super().__init__()
        self.kind = kind
        self.modules: dict[str, str] = {}
        _registries.append(self)

    def register(self, name: str, entry: Entry, module: str) -> None:
        """Add an entry; a module may register a name again, such as a notebook whose cell runs twice.

        Raises:
            UserError: the name is registered by another module.
        """
        holder = self.modules.get(name, module)
        if holder != module:
            taken = "is built in" if is_built_in(holder) else f"is taken by {display_module(holder)}"
            raise UserError(f"{self.kind} {name}: the name {taken}; rename the function")
        self[name] = entry
        self.modules[name] = module

    def forget(self, plugin: Plugin) -> None:
        """Remove the names that a plugin registered."""
        for name in self.registered_names(plugin):
            del self[name], self.modules[name]

    def registered_names(self, plugin: Plugin) -> list[str]:
        """The names that a plugin registered."""
        return [name for name, module in self.modules.items() if plugin.holds(module)]


_registries: list[Registry[Any]] = []
_loaded: dict[str, Plugin] = {}  # by module; plugins loaded in this process


def display_module(module: str) -> str:
    """The displayed name of a module: for a plugin file its name."""
    return f"{module.removeprefix(PACKAGE + '.')}.py" if module.startswith(f"{PACKAGE}.") else module


def read_plugins(entries: Sequence[str]) -> tuple[Plugin, ...]:
    """The plugins in the setting `import`; files are read.

    Raises:
        UserError: a file that cannot be read, two files of one name, or an entry that is neither a file nor a module.
    """
    plugins: dict[str, Plugin] = {}
    for entry in dict.fromkeys(entries):
        if entry.endswith(".py"):
            plugin = Plugin(entry, _read(entry))
        elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", entry):
            plugin = Plugin(entry, None)
        else:
            raise UserError(f"import: {entry} is neither a file that ends in .py nor the name of a module")
        if other := plugins.get(plugin.module):
            raise UserError(
                f"import: {written(other.name)} and {written(entry)} have one name; rename one of the files"
            )
        plugins[plugin.module] = plugin
    return tuple(plugins.values())


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"import: cannot read {written(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"import: {written(path)} is not UTF-8 text") from None


def load_plugins(plugins: Iterable[Plugin]) -> None:
    """Import plugins, which register their names.

    The same content is loaded once. A file whose content has changed replaces its earlier version.

    Raises:
        UserError: a plugin cannot be imported, registers nothing, or registers a name that is already registered.
    """
    for plugin in plugins:
        if _loaded.get(plugin.module) != plugin:
            _load(plugin)


def imported(entries: Sequence[str]) -> tuple[Plugin, ...]:
    """The plugins of a configuration as loaded in this process; missing ones are read and loaded.

    Raises:
        UserError: as `read_plugins` and `load_plugins`.
    """
    known = {plugin.name for plugin in _loaded.values()}
    load_plugins(read_plugins([entry for entry in entries if entry not in known]))
    plugins = {plugin.name: plugin for plugin in _loaded.values()}
    return tuple(plugins[entry] for entry in dict.fromkeys(entries))


def load_installed() -> None:
    """Import the entry points of other packages in the group `seenset.detectors`.

    Raises:
        UserError: as `load_plugins`.
    """
    load_plugins(Plugin(entry.module, None) for entry in entry_points(group=GROUP))


def _load(plugin: Plugin) -> None:
    _loaded.pop(plugin.module, None)
    if plugin.source is not None:
        _forget(plugin)
    try:
        with foreign_as_errors(), _limited():
            if plugin.source is None:
                importlib.import_module(plugin.name)
            else:
                _execute(plugin, plugin.source)
    except (Exception, SystemExit, _EndlessError) as error:  # an error raised by a user's code is a user error
        _forget(plugin)
        text = error_line(error)
        known = isinstance(error, (UserError, _EndlessError))
        raised = text if isinstance(error, ForeignError) else f"{type(error).__name__}: {text}"
        message = text if known else f"cannot be imported: {raised}"
        raise UserError(f"import: {written(plugin.name)}{_place(plugin, error)}: {message}") from None
    if not any(registry.registered_names(plugin) for registry in _registries):
        raise UserError(
            f"import: {written(plugin.name)} registers nothing; mark a function with @seenset.detector or "
            "@seenset.procedure"
        )
    _loaded[plugin.module] = plugin


class _EndlessError(BaseException):
    """An import takes too long. It is no Exception, which the code of a plugin may catch."""


@contextmanager
def _limited() -> Iterator[None]:
    """End an import after `IMPORT_SECONDS`, where it is in the main thread. An earlier timer of the process goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _EndlessError(f"its import takes more than {IMPORT_SECONDS:.0f} s")

    handler, started = signal.signal(signal.SIGALRM, stop), time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, IMPORT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining - (time.monotonic() - started)), interval)


def _forget(plugin: Plugin) -> None:
    for registry in _registries:
        registry.forget(plugin)


def _execute(plugin: Plugin, source: str) -> None:
    module = ModuleType(plugin.module)
    module.__file__ = plugin.name
    sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    sys.modules[plugin.module] = module  # for dataclasses and type hints
    try:
        exec(compile(source, plugin.name, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[plugin.module]
        raise


def _place(plugin: Plugin, error: BaseException) -> str:
    """The last line in a plugin's file, or in a file that it imports, at which it failed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        file, line = error.filename, error.lineno
    else:
        ours = {__file__, importlib.__file__}
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        frames = [entry for entry in frames if entry[0] not in ours and not entry[0].startswith("<frozen")]
        named = [entry for entry in frames if entry[0] == plugin.name] or frames
        if not named:
            return ""
        file, line = named[-1]
    return f", line {line}" if file == plugin.name else f" ({Path(file).name}, line {line})"


def place_of_error(module: str, error: BaseException) -> str:
    """Where an error was raised by a function of a module: `my_detectors.py, line 7`, or the name of the module."""
    plugin = _loaded.get(module)
    place = "" if plugin is None or plugin.source is None else _place(plugin, error)
    return f"{display_module(module)}{place if place.startswith(', ') else ''}"


def fingerprint_of_plugins(plugins: Iterable[Plugin], modules: Iterable[str]) -> dict[str, str]:
    """External code that scores depend on: name -> SHA-256 of its text.

    Args:
        plugins: plugins of the configuration; those that register only procedures do not affect scores.
        modules: modules of the detectors.
    """
    detectors = next(registry for registry in _registries if registry.kind == "detector")
    known = list(plugins)
    scoring = {plugin.label: _digest(plugin) for plugin in known if detectors.registered_names(plugin)}
    return dict(sorted({**scoring, **code_digests(known, modules)}.items()))


def code_digests(plugins: Iterable[Plugin], modules: Iterable[str]) -> dict[str, str]:
    """External code of modules: name -> SHA-256 of its text.

    Args:
        plugins: plugins of the configuration.
        modules: modules of registered functions.
    """
    known = list(plugins)
    code = {}
    for module in modules:
        if not is_built_in(module):
            plugin = next((plugin for plugin in known if plugin.holds(module)), Plugin(module, None))
            code[plugin.label] = _digest(plugin)
    return code


def _digest(plugin: Plugin) -> str:
    """SHA-256 of a file's text, or of all Python files of a module's package."""
    if plugin.source is not None:
        return hashlib.sha256(plugin.source.encode("utf-8", "surrogatepass")).hexdigest()
    path = getattr(importlib.import_module(plugin.label), "__file__", None)
    if path is None:
        return "unknown"
    folder = Path(path).parent
    files = sorted(folder.rglob("*.py")) if Path(path).name == "__init__.py" else [Path(path)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_reaches_workers(who: str, module: str, plugins: Iterable[Plugin]) -> None:
    """Check that workers load a module that registered a name.

    Raises:
        UserError: the module is neither built in, nor imported by the configuration, nor an entry point of a package.
    """
    if is_built_in(module) or any(plugin.holds(module) for plugin in plugins):
        return  # avoids reading the metadata of all installed packages
    packages = [Plugin(entry.module, None) for entry in entry_points(group=GROUP)]
    if not any(plugin.holds(module) for plugin in packages):
        raise UserError(
            f"{who} is defined in {display_module(module)}, which workers do not load: name its file under `import`"
        )


def is_built_in(module: str) -> bool:
    """Whether a module is of this package."""
    return module.split(".")[0] == BUILT_IN
