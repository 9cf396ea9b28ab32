"""The format of a file, by the ending of its name."""

import os

COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}
"""The endings of files that are decompressed while they are read, and the programs that do it by hand."""
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
BINARY = (
    *(".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".ico", ".tif", ".tiff", ".heic", ".psd"),
    *(".mp3", ".wav", ".ogg", ".flac", ".m4a", ".mp4", ".mkv", ".avi", ".mov", ".webm"),
    *ARCHIVES,
    *(".zst", ".jar", ".whl", ".deb", ".rpm", ".iso", ".dmg"),
    *(".pyc", ".pyo", ".pyd", ".class", ".so", ".dll", ".dylib", ".exe", ".wasm"),
    *(".pdf", ".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub", ".woff", ".woff2", ".ttf", ".otf"),
    *(".safetensors", ".pth", ".npy", ".npz", ".gguf", ".onnx", ".pkl", ".sqlite"),
)
"""Endings of files without text."""
_PERHAPS_BINARY = (".pt", ".o", ".a")  # endings of texts, too: their bytes decide
_FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
_FORMATS |= {".parquet": "parquet"}


def file_format(name: str) -> str:
    """Return `text`, or for rows `json`, `csv`, `parquet`, `hub` or `builtin`, by a name and its ending."""
    if name.startswith(("hub:", "builtin:")):
        return name.partition(":")[0]
    return _FORMATS.get(ending_of(name), "text")


def has_file_ending(name: str) -> bool:
    """Whether a name ends as those of files do, so that it is hardly a data set's on the hub."""
    ending = os.path.splitext(name.lower())[1]
    return ending in (".txt", ".md", ".yaml", *_FORMATS, *COMPRESSED, *BINARY, *_PERHAPS_BINARY)


def ending_of(name: str) -> str:
    """Return the ending that tells a file's format: the one before that of a compression, if there is one."""
    stem, ending = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if ending in COMPRESSED else ending


def endings_of(name: str) -> str:
    """Return the endings that tell a file's format and its compression, such as `.jsonl.gz`."""
    stem, ending = os.path.splitext(os.path.basename(name))
    return f"{os.path.splitext(stem)[1]}{ending}" if ending.lower() in COMPRESSED else ending
