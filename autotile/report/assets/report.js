"use strict";
(() => {
  const read = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
  const root = document.documentElement;
  const colours = read("colours"), figures = read("figures"), tables = read("tables");
  const narrow = window.matchMedia("(max-width: 640px)");
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  /* Themes: every colour of a figure is one of the light theme, and is exchanged for that of the same role. */
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const isDark = () => !printing && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const darkOf = Object.fromEntries(Object.keys(colours.light).map((role) => [colours.light[role], colours.dark[role]]));
  const themed = (value) => {
    if (!isDark()) return value;
    if (typeof value === "string") return Object.hasOwn(darkOf, value) ? darkOf[value] : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object" && !("bdata" in value))
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, themed(part)]));
    return value;
  };
  const colour = (role) => colours[isDark() ? "dark" : "light"][role];

  /* Charts are drawn when they come near the view. */
  const drawn = new Map();
  const settings = {
    responsive: true, displaylogo: false, showTips: false, scrollZoom: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const copy = (value) => JSON.parse(JSON.stringify(value));
  function draw(place) {
    const figure = figures[place.id];
    const shown = themed(copy(figure));
    if (figure.data.some((trace) => trace.type === "parcoords")) {
      const known = drawn.get(place);
      if (known) known.paint();
      else drawn.set(place, new Parallel(place, figure, { themed, colour, select }));
      return Promise.resolve();
    }
    const layout = { ...shown.layout, autosize: true };
    if (narrow.matches) layout.dragmode = false;
    const config = { ...settings, displayModeBar: narrow.matches || printing ? false : "hover" };
    drawn.set(place, place);
    return Plotly.react(place, shown.data, layout, config).then(() => { place.dataset.drawn = "1"; });
  }
  const select = (place, tests) => dataTables.get(place.dataset.table)?.brush(tests);
  const places = [...document.querySelectorAll(".plot")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  const redraw = () => [...drawn.keys()].map(draw);

  /* Tables of data: sorted by their headings, filtered by conditions and words, shown in pages, exported as CSV. */
  const PAGE = 50;
  const CONDITION = /^([^\s<>=!]+)(<=|>=|!=|=|<|>)(.+)$/;
  class DataTable {
    constructor(place, data) {
      this.place = place;
      this.data = data;
      this.rows = data.rows;
      this.sort = { column: -1, up: true };
      this.page = 0;
      this.brushed = [];
      this.query = "";
      this.build();
      this.apply();
    }

    build() {
      const names = this.data.columns.map((column) => column[0]);
      const example = names.includes("time") ? "outcome=ok time<1000" : names[0];
      const field = element("input", { type: "search", placeholder: `Filter: ${example}, or any words` });
      field.setAttribute("aria-label", "Filter the rows by conditions or words");
      field.addEventListener("input", () => { this.query = field.value; this.page = 0; this.apply(); });
      const save = element("button", { type: "button", textContent: "Export CSV", className: "export" });
      save.addEventListener("click", () => this.export());
      this.count = element("span", { className: "count" });
      this.count.setAttribute("role", "status");
      this.before = element("button", { type: "button", textContent: "Previous" });
      this.after = element("button", { type: "button", textContent: "Next" });
      this.before.addEventListener("click", () => { this.page -= 1; this.show(); });
      this.after.addEventListener("click", () => { this.page += 1; this.show(); });
      const head = element("tr");
      this.headings = this.data.columns.map(([name, unit, isNumber], index) => {
        const button = element("button", { type: "button", textContent: unit ? `${name}, ${unit}` : name });
        button.addEventListener("click", () => this.sortBy(index));
        const cell = element("th", { scope: "col", className: isNumber ? "number" : "" }, button);
        head.append(cell);
        return cell;
      });
      this.body = element("tbody");
      const table = element("table", {}, element("thead", {}, head), this.body);
      const scroll = element("div", { className: "scroll", tabIndex: 0 }, table);
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", "Table of all trials");
      const tools = element("div", { className: "tools" }, field, save);
      const pages = element("div", { className: "tools" }, this.before, this.after, this.count);
      this.place.replaceChildren(tools, scroll, pages);
    }

    brush(tests) {
      const names = this.data.columns.map((column) => column[0]);
      this.brushed = tests.map(([name, test]) => [names.indexOf(name), test]).filter(([index]) => index >= 0);
      this.page = 0;
      this.apply();
    }

    sortBy(column) {
      this.sort = { column, up: this.sort.column === column ? !this.sort.up : true };
      this.headings.forEach((cell, index) => {
        if (index === column) cell.setAttribute("aria-sort", this.sort.up ? "ascending" : "descending");
        else cell.removeAttribute("aria-sort");
      });
      this.page = 0;
      this.apply();
    }

    tests() {
      const names = this.data.columns.map((column) => column[0].toLowerCase());
      return this.query.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
        const found = CONDITION.exec(word), index = found ? names.indexOf(found[1]) : -1;
        if (index < 0) return (row) => row.some((cell) => cell !== null && String(cell).toLowerCase().includes(word));
        const [, , sign, text] = found, limit = Number(text);
        return (row) => {
          const cell = row[index];
          if (cell === null) return false;
          if (sign === "=" || sign === "!=") {
            const same = typeof cell === "number" && !Number.isNaN(limit) ? cell === limit : String(cell).toLowerCase() === text;
            return same === (sign === "=");
          }
          const value = Number(cell);
          return sign === "<" ? value < limit : sign === ">" ? value > limit : sign === "<=" ? value <= limit : value >= limit;
        };
      });
    }

    apply() {
      const tests = this.tests();
      this.kept = this.rows.filter((row) => tests.every((test) => test(row))
        && this.brushed.every(([index, test]) => test(row[index])));
      const { column, up } = this.sort;
      if (column >= 0) this.kept.sort((a, b) => compared(a[column], b[column], up));
      this.show();
    }

    show() {
      const pages = Math.max(1, Math.ceil(this.kept.length / PAGE));
      this.page = Math.min(Math.max(this.page, 0), pages - 1);
      const first = this.page * PAGE, shown = this.kept.slice(first, first + PAGE);
      this.body.replaceChildren(...shown.map((row) => element("tr", {}, ...row.map((cell, index) => {
        const text = cell === null ? "" : typeof cell === "number" ? this.number(cell, index) : String(cell);
        const made = element("td", { textContent: text, className: this.data.columns[index][2] ? "number" : "" });
        if (text.length > 40) made.title = text;
        return made;
      }))));
      this.before.disabled = this.page === 0;
      this.after.disabled = this.page === pages - 1;
      const range = shown.length ? `${first + 1}\u2013${first + shown.length} of ` : "";
      const all = this.kept.length < this.rows.length ? ` (${this.rows.length.toLocaleString("en")} in all)` : "";
      this.count.textContent = `${range}${this.kept.length.toLocaleString("en")} rows${all}`;
      this.place.dataset.drawn = "1";
    }

    number(value, index) {
      return this.data.columns[index][2] ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : String(value);
    }

    csv() {
      const cell = (value) => {
        let text = value === null ? "" : String(value);
        if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // no formula of a spreadsheet
        return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
      };
      const head = this.data.columns.map(([name, unit]) => (unit ? `${name} (${unit})` : name));
      return `${[head, ...this.kept].map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
    }

    export() {
      const url = URL.createObjectURL(new Blob([this.csv()], { type: "text/csv;charset=utf-8" }));
      const link = element("a", { href: url, download: `${this.data.file}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    }
  }
  function compared(a, b, up) {
    if (a === null || b === null) return (a === null) - (b === null); // without a value last, in both orders
    const order = typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
    return up ? order : -order;
  }
  const dataTables = new Map();
  for (const place of document.querySelectorAll(".data-table"))
    dataTables.set(place.id, new DataTable(place, tables[place.id]));

  const button = document.getElementById("theme");
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
    redraw();
  });
  system.addEventListener("change", () => { name(); redraw(); });
  name();
  window.addEventListener("beforeprint", () => {
    printing = true;
    for (const study of document.querySelectorAll("details.study")) study.open = true;
    places.map(draw);
  });
  window.addEventListener("afterprint", () => { printing = false; redraw(); });
  const target = () => {
    const study = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details");
    if (study) study.open = true;
  };
  window.addEventListener("hashchange", target);
  target();
  places.forEach((place) => watcher.observe(place));
})();
