// Tables: the data beside each figure, and the table of all runs that sorts and filters.

function plainTable({ head, rows }, name) {
  const top = make("tr", {}, ...head.map((text, i) => make("th", { scope: "col", class: i ? null : "text", text })));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, i) => make("td", { class: i ? null : "text", text }))));
  return make("table", { "aria-label": name }, make("thead", {}, top), make("tbody", {}, ...body));
}

const minutes = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${(seconds / 60).toFixed(1)} min`);
const groupOf = (run) => DATA.groups[run.group];

// name, what is sorted by, what is shown, whether it is text
const COLUMNS = [
  ["Run", (run) => run.name, null, true],
  ["Method", (run) => groupOf(run).method, null, true],
  ["Setting", (run) => groupOf(run).variant, null, true],
  ["κ", (run) => groupOf(run).kappa, short],
  ["Seed", (run) => run.seed, String],
  ["Acc", (run) => run.accuracy, percent],
  ["ACR", (run) => run.acr, percent],
  ["ART", (run) => run.art, percent],
  ["Attacked ACR", (run) => run.attacked, percent],
  ["Epochs", (run) => run.epochs, String],
  ["Root steps", (run) => run.steps, String],
  ["Schedule", (run) => run.schedule, null, true],
  ["Time", (run) => run.seconds, minutes],
  ["Hardware", (run) => run.hardware, null, true],
  ["Commit", (run) => run.commit, null, true],
];

function runTable() {
  const host = document.querySelector("#runs .scroll");
  const known = (value) => present(value) && value !== "";
  const columns = COLUMNS.filter(([, read]) => DATA.runs.some((run) => known(read(run))));
  const shown = ([, read, format], run) => (known(read(run)) ? (format ?? String)(read(run)) : "–");
  const lines = DATA.runs.map((run) => {
    const row = make("tr");
    for (const column of columns) {
      const cell = make("td", { class: column[3] ? "text" : null });
      if (column[0] === "Method") cell.append(make("i", { class: `swatch-cell ${groupOf(run).style.colour}` }));
      cell.append(shown(column, run));
      if (column[0] === "Run" && !run.certified) cell.append(make("span", { class: "tag", text: "not certified" }));
      row.append(cell);
    }
    return { run, row, words: row.textContent.toLowerCase(), all: columns.map((column) => shown(column, run)).join(" ").toLowerCase() };
  });
  const body = make("tbody", {}, ...lines.map((line) => line.row));
  const heads = columns.map(([name, read, , text]) => {
    const head = make("th", { scope: "col", class: text ? "text" : null, "aria-sort": "none" });
    head.append(make("button", { type: "button", text: name, on: { click: () => sort(head, read) } }));
    return head;
  });
  function sort(head, read) {
    const rising = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    // What is not known stays last either way.
    const compare = (a, b) => {
      const [one, two] = [read(a.run), read(b.run)];
      if (!known(one) || !known(two)) return known(two) - known(one);
      const order = typeof one === "string" ? one.localeCompare(two, "en", { numeric: true }) : one - two;
      return rising ? order : -order;
    };
    body.append(...lines.sort(compare).map((line) => line.row));
  }
  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const line of lines) {
      line.row.hidden = !words.every((word) => line.all.includes(word) || line.words.includes(word));
      count += line.row.hidden ? 0 : 1;
    }
    byId("count").textContent = `${count} of ${lines.length} runs`;
  }
  byId("filter").addEventListener("input", filter);
  host.replaceChildren(make("table", { "aria-label": "All runs" }, make("thead", {}, make("tr", {}, ...heads)), body));
  filter();
}
