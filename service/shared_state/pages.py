"""Pages of metrics of several processes, as one."""


def merged(pages: dict[str, bytes]) -> bytes:
    """Return Prometheus pages as one, each sample with its page's key as label `worker`."""
    families: dict[str, list[str]] = {}
    for worker, page in sorted(pages.items()):
        samples: list[str] = []
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                samples = families.setdefault(line.split(" ")[2], [line])
            elif line.startswith("# "):
                if line not in samples:
                    samples.append(line)
            else:
                name, bracket, rest = line.partition("{")
                if bracket:
                    samples.append(f'{name}{{worker="{worker}",{rest}')
                else:
                    name, _, value = line.partition(" ")
                    samples.append(f'{name}{{worker="{worker}"}} {value}')
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()
