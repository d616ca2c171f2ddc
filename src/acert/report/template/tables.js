// Tables: the data beside each figure, and the table of results that sorts and filters.

function plainTable({ head, rows }, name) {
  const top = make("tr", {}, ...head.map((text, i) => make("th", { scope: "col", class: i ? null : "text", text })));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, i) => make("td", { class: i ? null : "text", text }))));
  return make("table", { "aria-label": name }, make("thead", {}, top), make("tbody", {}, ...body));
}

// -- what the table of results lists --

const minutes = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${(seconds / 60).toFixed(1)} min`);
const groupOf = (run) => DATA.groups[run.group];
const known = (value) => present(value) && value !== "";
// A mean with its standard deviation, and over how many runs where these are not all.
const meanOf = (name) => (group) => {
  const [mean, std, n] = group[name];
  return percent(mean) + (present(std) ? ` ± ${percent(std)}` : "") + (n === group.n ? "" : ` (n = ${n})`);
};

// read gives what is sorted by, show what is shown. A column with `facts` is left out where it
// says the same of all rows; one with `best` has its highest value in bold.
const LISTS = {
  settings: {
    word: "settings",
    items: () => DATA.groups,
    group: (group) => group,
    columns: [
      { name: "Method", read: (group) => group.method, text: true, swatch: true },
      { name: "Setting", read: (group) => group.variant, text: true, facts: true },
      { name: "κ", read: (group) => group.kappa, show: (group) => short(group.kappa) },
      { name: "n", read: (group) => group.n || null },
      { name: "Acc", read: (group) => group.accuracy?.[0], show: meanOf("accuracy"), best: true },
      { name: "ACR", read: (group) => group.acr?.[0], show: meanOf("acr"), best: true },
      { name: "ART", read: (group) => group.art?.[0], show: meanOf("art"), best: true },
      { name: "Attacked ACR", read: (group) => group.attacked?.[0], show: meanOf("attacked") },
    ],
  },
  runs: {
    word: "runs",
    items: () => DATA.runs,
    group: groupOf,
    columns: [
      { name: "Run", read: (run) => run.name, text: true },
      { name: "Method", read: (run) => groupOf(run).method, text: true, swatch: true },
      { name: "Setting", read: (run) => groupOf(run).variant, text: true, facts: true },
      { name: "κ", read: (run) => groupOf(run).kappa, show: (run) => short(groupOf(run).kappa) },
      { name: "Seed", read: (run) => run.seed },
      { name: "Acc", read: (run) => run.accuracy, show: (run) => percent(run.accuracy) },
      { name: "ACR", read: (run) => run.acr, show: (run) => percent(run.acr) },
      { name: "ART", read: (run) => run.art, show: (run) => percent(run.art) },
      { name: "Attacked ACR", read: (run) => run.attacked, show: (run) => percent(run.attacked) },
      { name: "Epochs", read: (run) => run.epochs, facts: true },
      { name: "Root steps", read: (run) => run.steps, facts: true },
      { name: "Schedule", read: (run) => run.schedule, text: true, facts: true },
      { name: "Time", read: (run) => run.seconds, show: (run) => minutes(run.seconds) },
      { name: "Hardware", read: (run) => run.hardware, text: true, facts: true },
      { name: "Commit", read: (run) => run.commit, text: true, facts: true },
    ],
  },
};

const textOf = ({ read, show }, item) => (known(read(item)) ? (show ?? read)(item) : "–").toString();

// -- rows, sorting, filtering --

function tableRow(list, columns, item) {
  const group = list.group(item);
  const row = make("tr");
  for (const column of columns) {
    const text = textOf(column, item);
    const cell = make("td", { class: column.text ? "text" : null, title: text.length > 32 ? text : null });
    if (column.swatch) cell.append(make("i", { class: `swatch-cell ${group.style.colour}` }));
    cell.append(column.top !== undefined && column.read(item) === column.top ? make("b", { text }) : text);
    if (column === columns[0] && !(item.certified ?? group.n)) cell.append(make("span", { class: "tag", text: "not certified" }));
    row.append(cell);
  }
  return row;
}

// Rising or falling; what is not known stays last either way.
function sorted(lines, read, rising) {
  return lines.toSorted((a, b) => {
    const [one, two] = [read(a.item), read(b.item)];
    if (!known(one) || !known(two)) return known(two) - known(one);
    const order = typeof one === "string" ? one.localeCompare(two, "en", { numeric: true }) : one - two;
    return rising ? order : -order;
  });
}

// The table of one list, the facts that hold for all of its rows, and its lines for the filter.
function resultTable(list, name) {
  const items = list.items();
  const used = list.columns.filter(({ read }) => items.some((item) => known(read(item))));
  const same = (column) => column.facts && new Set(items.map((item) => textOf(column, item))).size === 1;
  const columns = used.filter((column) => !same(column)).map((column) => (
    column.best && items.length > 1 ? { ...column, top: highest(items.map(column.read).filter(present)) } : column));
  const lines = items.map((item) => {
    const row = tableRow(list, columns, item);
    const words = [row.textContent, ...used.map((column) => textOf(column, item))].join(" ").toLowerCase();
    return { item, row, words };
  });
  const body = make("tbody", {}, ...lines.map((line) => line.row));
  const heads = columns.map(({ name: word, read, text }) => {
    const head = make("th", { scope: "col", class: text ? "text" : null, "aria-sort": "none" });
    const sort = () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      body.append(...sorted(lines, read, rising).map((line) => line.row));
    };
    head.append(make("button", { type: "button", text: word, on: { click: sort } }));
    return head;
  });
  const table = make("table", { "aria-label": name }, make("thead", {}, make("tr", {}, ...heads)), body);
  const facts = used.filter(same).map((column) => `${column.name.toLowerCase()} ${textOf(column, items[0])}`);
  return { table, lines, word: list.word, facts: facts.length ? `All of them: ${facts.join(", ")}.` : "" };
}

function results() {
  const section = byId("runs");
  let shown = null;
  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { row, words: own } of shown.lines) row.hidden = !words.every((word) => own.includes(word));
    const count = shown.lines.filter(({ row }) => !row.hidden).length;
    byId("count").textContent = `${count} of ${shown.lines.length} ${shown.word}`;
  }
  const buttons = [...byId("lists").children];
  const choose = (button) => {
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    shown = resultTable(LISTS[button.dataset.list], button.textContent);
    section.querySelector(".scroll").replaceChildren(shown.table);
    byId("run-facts").textContent = shown.facts;
    filter();
  };
  for (const button of buttons) button.addEventListener("click", () => choose(button));
  byId("filter").addEventListener("input", filter);
  choose(buttons[0]);
}
