"""Search pictures by text: a model of texts and images ranks them for each query.

    pip install 'jaxembed[images]'
    python examples/search_pictures.py
    python examples/search_pictures.py "a red square" --model MODEL --sheet found.png

The pictures are drawn here, coloured shapes, so that a ranking shows at once whether it is right.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jaxembed import Embedder

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = {  # the corners, on a canvas of one by one; a circle has those of the box around it
    "square": [(0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8)],
    "triangle": [(0.5, 0.2), (0.8, 0.8), (0.2, 0.8)],
    "circle": [(0.2, 0.2), (0.8, 0.8)],
}
QUERIES = ("a red square", "a blue circle", "a green triangle", "something yellow")
SIDE = 224  # pixels of a picture, as most models take them

Pictures = dict[str, Image.Image]  # by what they show
Ranking = list[tuple[float, str]]  # scores and names, best first


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    pictures = draw_pictures()
    with Embedder(args.model) as embedder:
        rankings = search(embedder, args.queries, pictures, args.top_k)
    for query, ranking in rankings.items():
        print(f"\n{query}")
        for score, name in ranking:
            print(f"  {score:7.4f}  {name}")
    if args.sheet:
        contact_sheet(args.model, rankings, pictures).save(args.sheet)


def draw_pictures() -> Pictures:
    """A picture of each shape in each colour, on white."""
    pictures = {}
    for colour in COLOURS:
        for shape, corners in SHAPES.items():
            picture = Image.new("RGB", (SIDE, SIDE), "white")
            places = [(x * SIDE, y * SIDE) for x, y in corners]
            drawing = ImageDraw.Draw(picture)
            (drawing.ellipse if shape == "circle" else drawing.polygon)(places, fill=colour)
            pictures[f"a {colour} {shape}"] = picture
    return pictures


def search(
    embedder: Embedder, queries: Sequence[str], pictures: Pictures, top_k: int
) -> dict[str, Ranking]:
    """The `top_k` pictures nearest to each query."""
    names = list(pictures)
    found = embedder.encode(images=list(pictures.values()), normalize=True)  # [pictures, dim]
    asked = embedder.encode(list(queries), normalize=True)  # [queries, dim]
    scores = asked @ found.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return {
        query: [(float(row[i]), names[i]) for i in best]
        for query, row, best in zip(queries, scores, order, strict=True)
    }


def contact_sheet(title: str, rankings: dict[str, Ranking], pictures: Pictures) -> Image.Image:
    """A row for each query: its text, and the pictures that were found with their scores."""
    small, left, line = SIDE // 2, 180, 24  # pixels
    columns = max(map(len, rankings.values()))
    size = (left + columns * small, line + len(rankings) * (small + line))
    sheet = Image.new("RGB", size, "white")
    drawing, font = ImageDraw.Draw(sheet), ImageFont.load_default(16)
    drawing.text((8, 4), title, "black", font)
    for row, (query, ranking) in enumerate(rankings.items()):
        top = line + row * (small + line)
        drawing.line((0, top, size[0], top), "lightgray")
        drawing.text((8, top + small // 2), query, "black", font)
        for column, (score, name) in enumerate(ranking):
            place = left + column * small
            sheet.paste(pictures[name].resize((small, small)), (place, top + 1))
            middle = (place + small // 2, top + small)
            drawing.text(middle, f"{score:.3f}", "black", font, anchor="ma")
    return sheet


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("queries", nargs="*", default=QUERIES, help="texts to search for")
    parser.add_argument("--model", default="openai/clip-vit-base-patch32")
    parser.add_argument("--top-k", type=int, default=4, help="pictures that are shown of each")
    parser.add_argument("--sheet", type=Path, help="write what was found as an image, .png")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
