"""Pins the images of other projects by digest: what a tag stands for can be replaced, what a digest stands for cannot.

    python deploy/pin.py            pulls each image and writes NAME:TAG@sha256:… in its place; needs docker and the registries
    python deploy/pin.py --check    lists the images without a digest, exit code 1 if there are any; needs neither

Images are named in three files only: `.env` (compose stack), `deploy/Dockerfile` (BASE) and the chart's `values.yaml` (Redis).
The repository has tags, because a digest has to be looked up in a registry that you trust: pin your copy, and keep it pinned by
`--check` in your CI. To move on to a newer tag, write the tag without a digest and pin again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# By file: lines that name an image, with the image as group 2.
PLACES: dict[str, str] = {
    ".env": r"^(\w+_IMAGE=)(\S+)$",
    "deploy/Dockerfile": r"^(ARG BASE=)(\S+)$",
    "deploy/kubernetes/chart/values.yaml": r"^(  image: )([\w./-]+:[\w.-]+(?:@\S+)?)(?= |$)",
}
REFERENCE = re.compile(r"(?P<name>[\w./:-]+?):(?P<tag>[\w][\w.-]{0,127})(@(?P<digest>sha256:[0-9a-f]{64}))?")
DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class Image:
    """`file`: where it is named, relative to the root. `reference`: NAME:TAG, with or without @DIGEST."""

    file: str
    reference: str

    @property
    def pinned(self) -> bool:
        return "@" in self.reference


def images(root: Path = ROOT) -> list[Image]:
    """Raises `ValueError` for a reference without a tag, with the tag `latest`, or with a digest that is none."""
    found = []
    for file, pattern in PLACES.items():
        for match in re.finditer(pattern, (root / file).read_text(), re.MULTILINE):
            parsed = REFERENCE.fullmatch(match[2])
            if parsed is None or parsed["tag"] == "latest":
                raise ValueError(f"{file}: {match[2]} is not NAME:TAG or NAME:TAG@sha256:DIGEST, with a tag that stays")
            found.append(Image(file, match[2]))
    return found


def pin(root: Path, digest_of: Callable[[str], str]) -> list[Image]:
    """Write the digest of each image that has none. Returns the images as they are now."""
    for file, pattern in PLACES.items():
        text = (root / file).read_text()
        for image in (each for each in images(root) if each.file == file and not each.pinned):
            new = f"{image.reference}@{digest_of(image.reference)}"
            text = re.sub(pattern, partial(_replaced, image.reference, new), text, flags=re.MULTILINE)
        (root / file).write_text(text)
    return images(root)


def _replaced(old: str, new: str, match: re.Match[str]) -> str:
    return f"{match[1]}{new if match[2] == old else match[2]}"


def pulled_digest(image: str) -> str:
    """Pull an image; return the digest under which the registry has it, for all platforms. Raises `ValueError`."""
    for command in (
        ["docker", "pull", "--quiet", image],
        ["docker", "image", "inspect", image, "--format", '{{join .RepoDigests "\\n"}}'],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{image}: `{' '.join(command[:3])}` failed: {done.stderr.strip()[-400:]}")
    found = {match[1] for line in done.stdout.split() if (match := DIGEST.search(line))}
    if len(found) != 1:
        raise ValueError(
            f"{image}: the engine knows {len(found)} digests of it, not one; remove the image and pin again"
        )
    return found.pop()


def main(arguments: Sequence[str]) -> int:
    try:
        match arguments:
            case []:
                found = pin(ROOT, pulled_digest)
            case ["--check"]:
                found = images()
            case _:
                sys.stderr.write("usage: pin.py [--check]\n")
                return 2
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for image in found:
        sys.stdout.write(f"{'pinned' if image.pinned else 'BY TAG'}  {image.file}: {image.reference}\n")
    return int(not all(image.pinned for image in found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
