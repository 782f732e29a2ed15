"""A client of `rapid serve`: asks for images and saves them as PNG files. It needs nothing but Python.

python examples/client.py --url http://127.0.0.1:8000 --count 4 --out images/
"""

import argparse
import base64
import json
import urllib.request
from pathlib import Path


def main() -> None:
    """One POST /generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--labels", help="class names, separated by commas; default: all in turn")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--token", help="if the server asks for one")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    labels = None
    if options.labels:
        names = options.labels.split(",")
        labels = [names[number % len(names)] for number in range(options.count)]
    body = json.dumps({"count": options.count, "labels": labels, "seed": options.seed}).encode()
    request = urllib.request.Request(f"{options.url}/generate", body, {"Content-Type": "application/json"})
    if options.token:
        request.add_header("Authorization", f"Bearer {options.token}")
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)

    options.out.mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(answer["images"], answer["labels"], strict=True)):
        (options.out / f"{number:03d}-{label}.png").write_bytes(base64.b64decode(image))
    privacy = answer["privacy"]
    claim = "public images alone" if privacy is None else f"epsilon {privacy['epsilon']} at delta {privacy['delta']}"
    print(f"{options.out}: {options.count} images of {answer['model']} ({claim}), seed {answer['seed']}")


if __name__ == "__main__":
    main()
