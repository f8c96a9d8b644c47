"""Pictures of reports, light, dark and as on a phone: those of docs/report.md, and others to look at.

    .venv/bin/python tests/helpers/report_pictures.py logs/exp_001 logs/agent/exp_001 OUT

The first run has dumped steps. The second has an agent whose rollouts branch (branching_agent.py). OUT gets a file for
each view and form, such as group_phone.png. Needs chromium and chromedriver, and no network.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from browser import browser

from tools import report

# width, height, theme, whether it is a phone, pixels for each of the page's
FORMS = {"light": (1280, 860, "light", False, 1), "dark": (1280, 860, "dark", False, 1)}
FORMS["phone"] = (390, 844, "light", True, 2)
MIXED = "new Set(samples.filter(o => o.group === s.group).map(o => o.outcome)).size > 1"
DUMPED = f"samples.find(s => s.kind === 'train, dumped' && s.index === 0 && {MIXED}).key"
BRANCHED = "samples.find(s => s.kind === 'train, dumped' && s.tree.length > 4 && s.advantage !== 0).key"
# view -> (number of the run, the sample that is open, the rest of the address)
VIEWS = {
    "top": (0, "", ""),
    "list": (0, "", "outcome=wrong"),
    "reply": (0, DUMPED, "colour=entropy"),
    "group": (0, DUMPED, "view=group&colour=advantage&step_max=41"),
    "messages": (1, BRANCHED, "colour=surprise"),
}


def main(folders: list[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for folder in folders:
        run = report.read_run(folder, folder.name, report.MAX_SAMPLES)
        file = out / f"report_{len(files)}.html"
        file.write_text(report.as_page([run], 0))
        files.append(file)
    with browser() as session:
        for form, size in FORMS.items():
            session.show_as(*size)
            for view, (number, sample, address) in VIEWS.items():
                session.open(files[number])
                if sample:
                    key = session.run(f"return {sample}")
                    address += f"&open={key}"
                session.open(files[number], address)
                if view != "top":
                    session.run("$('samples').scrollIntoView({ behavior: 'instant' })")
                session.picture(out / f"{view}_{form}.png")


if __name__ == "__main__":
    *runs, target = map(Path, sys.argv[1:])
    main(runs, target)
