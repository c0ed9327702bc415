"""``python -m docs.generators``: write every page that has changed."""

from __future__ import annotations

from docs.generators.pages import PAGES


def main() -> None:
    for path, text in PAGES.items():
        written = text()
        if not path.exists() or path.read_text("utf-8") != written:
            path.parent.mkdir(exist_ok=True)
            path.write_text(written, "utf-8")
            print(f"written: {path}")


if __name__ == "__main__":
    main()
