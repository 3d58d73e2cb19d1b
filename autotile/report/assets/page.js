"use strict";
/* The script of all pages: themes, charts, parallel coordinates, tables of data; then the page of a report, whose figures
   and tables are in it, and the live page, which asks for them. */
(() => {
  const root = document.documentElement;
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const copy = (value) => JSON.parse(JSON.stringify(value));

  /* Themes: every colour of a figure is one of the light theme, and is exchanged for that of the same role. */
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  let colours = { light: {}, dark: {} };
  let darkOf = {};
  function setColours(given) {
    colours = given;
    darkOf = Object.fromEntries(Object.keys(given.light).map((role) => [given.light[role], given.dark[role]]));
  }
  const isDark = () => !printing && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const colour = (role) => colours[isDark() ? "dark" : "light"][role];
  const themed = (value) => {
    if (!isDark()) return value;
    if (typeof value === "string") return Object.hasOwn(darkOf, value) ? darkOf[value] : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object" && !("bdata" in value))
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, themed(part)]));
    return value;
  };

  /* Charts: by Plotly, or by `Parallel`, which keeps the ranges that are selected. */
  const parallels = new Map();
  function draw(place, figure, layout, config) {
    if (figure.data.some((trace) => trace.type === "parcoords")) {
      const known = parallels.get(place);
      if (!known) parallels.set(place, new Parallel(place, figure));
      else if (known.figure === figure) known.paint();
      else known.update(figure);
      return;
    }
    const shown = themed(copy(figure));
    Plotly.react(place, shown.data, { ...shown.layout, ...layout }, { responsive: true, ...config })
      .then(() => { place.dataset.drawn = "1"; });
  }

  /* Parallel coordinates on a canvas: Plotly's own need WebGL and code that the pages' policies forbid. Ranges are
     selected by dragging along an axis, or by the fields below, which the keyboard reaches; they filter a table. */
  /* Numbers that Plotly stores as bytes. */
  const ARRAYS = {
    i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array,
    f4: Float32Array, f8: Float64Array,
  };
  function numbers(values) {
    if (Array.isArray(values)) return values;
    const bytes = Uint8Array.from(atob(values.bdata), (one) => one.charCodeAt(0));
    return new ARRAYS[values.dtype](bytes.buffer);
  }

  const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}\u2026` : text);

  class Parallel {
    constructor(place, figure) {
      this.place = place;
      this.canvas = element("canvas");
      this.canvas.setAttribute("aria-hidden", "true");
      this.status = element("p", { className: "note" });
      this.status.setAttribute("aria-live", "polite");
      this.brushes = element("div", { className: "brushes" });
      this.load(figure);
      place.classList.add("parallel");
      place.replaceChildren(this.canvas, this.status, this.brushes);
      place.setAttribute("role", "group");
      this.listen();
      this.resizer = new ResizeObserver(() => this.paint());
      this.resizer.observe(place);
      this.paint();
      place.dataset.drawn = "1";
    }

    /* Draw another figure of the same kind; the ranges that are selected stay. */
    update(figure) {
      const before = new Map(this.axes.map((axis) => [axis.name, axis]));
      const focused = this.axes.findIndex((axis) => axis.select === document.activeElement);
      this.load(figure);
      for (const axis of this.axes) {
        const old = before.get(axis.name);
        if (!old?.range) continue;
        if (axis.isNumber) {
          axis.select.value = old.select.value;
          axis.range = axis.select.value === "" ? old.range : [axis.low, axis.cuts[Number(axis.select.value)]];
          continue;
        }
        const names = old.names.filter((_, code) => code >= old.range[0] && code <= old.range[1]);
        const codes = names.map((text) => axis.names.indexOf(text)).filter((code) => code >= 0); // values may be new
        if (!codes.length) continue;
        axis.range = [Math.min(...codes) - 0.5, Math.max(...codes) + 0.5];
        if (old.select.value !== "") axis.select.value = String(codes[0]);
      }
      if (focused >= 0) this.axes[focused]?.select.focus();
      this.paint();
    }

    load(figure) {
      this.figure = figure;
      const trace = figure.data.find((one) => one.type === "parcoords");
      this.axes = trace.dimensions.map((one, index) => this.axis(one, figure.layout.meta.axes[index]));
      this.colours = numbers(trace.line.color);
      this.scale = trace.line.colorscale;
      this.order = [...this.colours.keys()].sort((a, b) => this.colours[b] - this.colours[a]);
      this.rank = new Float64Array(this.order.length); // 0 for the fastest: times have a long tail, ranks do not
      this.order.forEach((line, place) => { this.rank[line] = 1 - place / Math.max(1, this.order.length - 1); });
      this.height = figure.layout.height;
      this.brushes.replaceChildren(...this.fields());
    }

    close() { this.resizer.disconnect(); this.abort.abort(); }

    axis(dimension, meta) {
      const values = numbers(dimension.values);
      let [low, high] = dimension.range ?? [Math.min(...values), Math.max(...values)];
      if (low === high) { low -= 0.5; high += 0.5; }
      const isNumber = !dimension.ticktext;
      const ticks = isNumber ? [low, (low + high) / 2, high] : dimension.tickvals;
      const isLog = isNumber && low > 0 && high > 3 * low;
      if (isLog) ticks[1] = Math.sqrt(low * high);
      const texts = isNumber ? ticks.map((one) => one.toLocaleString("en", { maximumSignificantDigits: 4 }))
        : ticks.map((code) => meta.values[code]);
      return { name: meta.name, values, low, high, ticks, texts, isNumber, isLog, names: meta.values, range: null };
    }

    fields() {
      const made = [];
      for (const axis of this.axes) {
        const names = axis.names ?? this.quantiles(axis);
        const select = element("select", {}, element("option", { value: "", textContent: "all" }));
        names.forEach((text, index) => select.append(element("option", { value: String(index), textContent: text })));
        select.addEventListener("change", () => {
          const index = Number(select.value);
          if (select.value === "") axis.range = null;
          else axis.range = axis.isNumber ? [axis.low, axis.cuts[index]] : [index - 0.5, index + 0.5];
          this.changed();
        });
        axis.select = select;
        made.push(element("label", {}, axis.name, select));
      }
      const clear = element("button", { type: "button", textContent: "Clear" });
      clear.addEventListener("click", () => { for (const axis of this.axes) axis.range = null; this.changed(true); });
      made.push(clear);
      return made;
    }

    quantiles(axis) {
      const sorted = [...axis.values].sort((a, b) => a - b);
      axis.cuts = [0.01, 0.05, 0.25, 0.5].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
      return ["fastest 1 %", "fastest 5 %", "fastest quarter", "fastest half"];
    }

    listen() {
      this.abort = new AbortController();
      const signal = this.abort.signal;
      let start = null;
      this.canvas.addEventListener("pointerdown", (event) => {
        const axis = this.nearest(event.offsetX);
        if (!axis) return;
        start = { axis, value: this.valueAt(axis, event.offsetY) };
        this.canvas.setPointerCapture(event.pointerId);
      }, { signal });
      this.canvas.addEventListener("pointermove", (event) => {
        if (!start) return;
        const value = this.valueAt(start.axis, event.offsetY);
        start.axis.range = [Math.min(start.value, value), Math.max(start.value, value)];
        this.paint();
      }, { signal });
      this.canvas.addEventListener("pointerup", (event) => {
        if (!start) return;
        const { axis, value } = start, end = this.valueAt(axis, event.offsetY);
        if (Math.abs(end - value) < 0.01 * (axis.high - axis.low)) axis.range = null;
        start = null;
        this.changed(true);
      }, { signal });
    }

    get width() { return this.place.clientWidth; }
    x(index) { return 46 + (index * (this.width - 92)) / Math.max(1, this.axes.length - 1); }
    y(axis, value) {
      const share = axis.isLog ? Math.log(value / axis.low) / Math.log(axis.high / axis.low)
        : (value - axis.low) / (axis.high - axis.low);
      return this.height - 22 - share * (this.height - 72);
    }
    valueAt(axis, y) {
      const share = Math.min(1.02, Math.max(-0.02, (this.height - 22 - y) / (this.height - 72)));
      return axis.isLog ? axis.low * (axis.high / axis.low) ** share : axis.low + share * (axis.high - axis.low);
    }
    nearest(x) { return this.axes.find((axis, index) => Math.abs(this.x(index) - x) < 18); }

    selected(line) {
      return this.axes.every((axis) => !axis.range
        || (axis.values[line] >= axis.range[0] && axis.values[line] <= axis.range[1]));
    }

    changed(fields = false) {
      if (fields) for (const axis of this.axes) if (!axis.range || !axis.isNumber) axis.select.value = "";
      this.paint();
      const tests = this.axes.filter((axis) => axis.range).map((axis) => {
        const [low, high] = axis.range;
        if (axis.isNumber) return [axis.name, (value) => value !== null && value >= low && value <= high];
        const kept = new Set(axis.names.filter((_, code) => code >= low && code <= high));
        return [axis.name, (value) => kept.has(String(value))];
      });
      dataTables.get(this.place.dataset.table)?.brush(tests);
    }

    paint() {
      const ratio = window.devicePixelRatio || 1, width = this.width;
      this.shades = themed(this.scale);
      if (!width) return;
      this.canvas.width = width * ratio;
      this.canvas.height = this.height * ratio;
      this.canvas.style.height = `${this.height}px`;
      const pen = this.canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.fillStyle = colour("paper");
      pen.fillRect(0, 0, width, this.height);
      const brushed = this.axes.some((axis) => axis.range);
      const kept = this.order.filter((line) => this.selected(line));
      const lines = (chosen, style) => {
        for (const line of chosen) {
          pen.strokeStyle = style(line);
          pen.beginPath();
          this.axes.forEach((axis, index) => pen.lineTo(this.x(index), this.y(axis, axis.values[line])));
          pen.stroke();
        }
      };
      pen.globalAlpha = kept.length > 800 ? 0.35 : 0.7;
      if (brushed) { pen.globalAlpha = 0.25; lines(this.order, () => colour("grid")); pen.globalAlpha = 0.8; }
      lines(kept, (line) => this.colourOf(this.rank[line]));
      pen.globalAlpha = 1;
      this.axes.forEach((axis, index) => this.paintAxis(pen, axis, this.x(index), index));
      this.status.textContent = brushed
        ? `${kept.length.toLocaleString("en")} of ${this.order.length.toLocaleString("en")} lines are selected.`
        : "Drag along an axis to select a range; a click on the axis clears it.";
    }

    paintAxis(pen, axis, x, index) {
      pen.strokeStyle = colour("muted");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, this.y(axis, axis.low));
      pen.lineTo(x, this.y(axis, axis.high));
      pen.stroke();
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillStyle = colour("ink");
      pen.fillText(short(axis.name, 14), x, index % 2 ? 18 : 34, this.x(1) * 1.8);
      const last = index === this.axes.length - 1;
      pen.textAlign = last ? "right" : "left";
      axis.ticks.forEach((tick, place) => {
        const text = short(axis.texts[place], 10), y = this.y(axis, tick), at = x + (last ? -5 : 5);
        pen.lineWidth = 3;
        pen.strokeStyle = colour("paper");
        pen.strokeText(text, at, y + 4);
        pen.fillStyle = colour("ink");
        pen.fillText(text, at, y + 4);
      });
      if (!axis.range) return;
      const [low, high] = axis.range.map((value) => this.y(axis, Math.min(axis.high, Math.max(axis.low, value))));
      pen.fillStyle = colour("accent");
      pen.globalAlpha = 0.35;
      pen.fillRect(x - 7, high - 3, 14, low - high + 6);
      pen.globalAlpha = 1;
    }

    colourOf(share) {
      const stops = this.shades;
      const next = Math.max(1, stops.findIndex((stop) => stop[0] >= share));
      const [from, to] = [stops[next - 1], stops[next]];
      const part = (share - from[0]) / (to[0] - from[0] || 1);
      const rgb = [from[1], to[1]].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
      return `rgb(${rgb[0].map((one, index) => Math.round(one + part * (rgb[1][index] - one))).join(",")})`;
    }
  }

  /* Tables of data: sorted by their headings, filtered by conditions and words, shown in pages, exported as CSV. */
  const PAGE = 50;
  const CONDITION = /^([^\s<>=!]+)(<=|>=|!=|=|<|>)(.+)$/;
  class DataTable {
    constructor(place, data) {
      this.place = place;
      this.data = data;
      this.rows = data.rows;
      const decimals = (cell) => (typeof cell === "number" ? (String(cell).split(".")[1] || "").length : 0);
      this.decimals = data.columns.map((_, index) => Math.min(4, this.rows.reduce((most, row) => Math.max(most, decimals(row[index])), 0)));
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
      this.count.textContent = `${range}${this.kept.length.toLocaleString("en")} row${this.kept.length === 1 ? "" : "s"}${all}`;
      this.place.dataset.drawn = "1";
    }

    number(value, index) {
      const [, unit, isNumber] = this.data.columns[index], digits = this.decimals[index];
      if (!isNumber) return String(value);
      return value.toLocaleString("en", unit === "\u00b5s" && digits
        ? { minimumSignificantDigits: 6, maximumSignificantDigits: 6 }
        : { minimumFractionDigits: digits, maximumFractionDigits: digits });
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

  /* The page of a report, a comparison or a survey. */
  function report() {
    const read = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
    const figures = read("figures"), tables = read("tables");
    setColours(read("colours"));
    const narrow = window.matchMedia("(max-width: 640px)");
    const settings = {
      displaylogo: false, showTips: false, scrollZoom: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    };
    const drawn = new Set();
    function show(place) {
      drawn.add(place);
      const displayModeBar = narrow.matches || printing ? false : "hover";
      const layout = narrow.matches ? { autosize: true, dragmode: false } : { autosize: true };
      draw(place, figures[place.id], layout, { ...settings, displayModeBar });
    }
    const places = [...document.querySelectorAll(".plot")];
    const watcher = new IntersectionObserver((entries) => { // charts are drawn when they come near the view
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        watcher.unobserve(entry.target);
        show(entry.target);
      }
    }, { rootMargin: "400px" });
    const redraw = () => drawn.forEach(show);
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
      places.forEach(show);
    });
    window.addEventListener("afterprint", () => { printing = false; redraw(); });
    const target = () => {
      const study = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details");
      if (study) study.open = true;
    };
    window.addEventListener("hashchange", target);
    target();
    places.forEach((place) => watcher.observe(place));
  }

  /* The live page: asks for the list of sessions once a second, and for the charts of those shown if they changed. */
  function watch() {
    const POLL_MS = 1000;
    const RETRY_MS = 3000;
    const STATES = {
      running: (session) => `running, ${session.elapsed}`,
      ended: (session) => `ended after ${session.elapsed}`,
      imported: () => "imported",
      silent: (session) => `no trial for ${session.silent}: it compiles, or it was killed`,
    };

    const byId = (id) => document.getElementById(id);
    const chosen = new Map(); // sessions that the reader has shown or hidden, by name
    const columns = new Map();

    function row(cells, tag = "td") {
      const made = element("tr");
      for (const cell of cells) made.append(cell instanceof Node ? cell : element(tag, { textContent: cell }));
      return made;
    }

    // Charts are drawn when they come into view: many sessions side by side have more than a browser draws at once.
    const inView = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        entry.target.visible = entry.isIntersecting;
        drawIfNeeded(entry.target);
      }
    }, { rootMargin: "200px" });

    function drawIfNeeded(plot) {
      if (!plot.visible || !plot.pending) return;
      plot.figure = plot.pending;
      plot.pending = null;
      show(plot);
    }

    function show(plot) {
      draw(plot, plot.figure, { uirevision: plot.dataset.chart }, { displayModeBar: false }); // what is zoomed stays
    }

    system.addEventListener("change", () => {
      for (const plot of document.querySelectorAll(".plot")) if (plot.figure) show(plot);
    });

    class Column {
      constructor(name) {
        this.name = name;
        this.version = "";
        this.number = 0;
        this.charts = new Map();
        this.root = element("section", { className: "session", id: `session-${name}` });
        this.heading = element("h2");
        this.place = element("p", { className: "place" });
        this.state = element("p", { className: "state" });
        this.bar = element("progress", { max: 1 });
        this.left = element("span");
        this.progress = element("p", { className: "progress" }, this.bar, this.left);
        this.facts = element("dl");
        this.plots = element("div", { className: "charts" });
        this.latest = element("tbody");
        const head = element("thead", {}, row(["trial", "outcome", "time", "configuration", "reason"], "th"));
        const scroll = element("div", { className: "scroll" }, element("table", {}, head, this.latest));
        const newest = element("summary", {}, "Newest trials");
        const latest = element("details", { className: "latest", open: true }, newest, scroll);
        this.root.append(this.heading, this.place, this.state, this.progress, this.facts, this.plots, latest);
      }

      list(session) {
        this.heading.textContent = `${session.kernel} ${session.problem}`;
        this.place.textContent = session.host ? `${session.device}, ${session.host}` : session.device;
        const trials = `${session.trials.toLocaleString("en")} ${session.trials === 1 ? "trial" : "trials"}`;
        this.state.textContent = `${STATES[session.state](session)}; ${trials}`;
        this.root.dataset.state = session.state;
        this.progress.hidden = session.progress === null;
        if (session.progress === null) return;
        const { share, text, left } = session.progress;
        this.bar.value = share;
        this.bar.setAttribute("aria-label", text);
        this.left.textContent = [text, session.state === "silent" ? "" : left].filter(Boolean).join(", ");
      }

      async update(session) {
        if (this.version === session.version) return;
        const found = await ask(`session/${encodeURIComponent(session.name)}?since=${this.number}`);
        if (!found.charts) return; // not read or not drawn yet
        const { facts, latest, order } = found.texts;
        this.number = found.number;
        if (found.version === session.version) this.version = session.version;
        this.facts.replaceChildren(...facts.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
        this.latest.replaceChildren(...latest.map((cells) => row(cells)));
        for (const chart of found.charts) this.change(chart);
        const shown = order.map((name) => this.charts.get(name)).filter((one) => one && one.hasFigure);
        for (const [name, one] of this.charts) if (!order.includes(name) || !one.hasFigure) one.root.remove();
        shown.forEach((one, place) => {
          if (this.plots.children[place] !== one.root) this.plots.insertBefore(one.root, this.plots.children[place] ?? null);
        });
      }

      change({ texts, figure }) {
        let one = this.charts.get(texts.name);
        if (!one) {
          one = { root: element("figure"), title: element("h3"), plot: element("div", { className: "plot" }) };
          one.caption = element("figcaption");
          one.table = element("table");
          one.root.dataset.chart = one.plot.dataset.chart = texts.name;
          const scroll = element("div", { className: "scroll" }, one.table);
          const numbers = element("details", {}, element("summary", {}, "Numbers"), scroll);
          one.root.append(one.title, one.plot, one.caption, numbers);
          inView.observe(one.plot);
          this.charts.set(texts.name, one);
        }
        one.hasFigure = figure !== null;
        one.title.textContent = texts.title;
        one.caption.textContent = [texts.summary, texts.note].filter(Boolean).join(" ");
        one.plot.setAttribute("role", "img");
        one.plot.setAttribute("aria-label", texts.summary);
        const body = element("tbody", {}, ...texts.rows.map((cells) => row(cells)));
        one.table.replaceChildren(element("thead", {}, row(texts.headings, "th")), body);
        if (figure !== null) {
          one.plot.pending = figure;
          one.plot.style.minHeight = `${figure.layout.height ?? 300}px`; // nothing moves when it is drawn
          drawIfNeeded(one.plot);
        }
      }

      remove() {
        for (const one of this.charts.values()) {
          inView.unobserve(one.plot);
          const parallel = parallels.get(one.plot);
          if (parallel) parallel.close();
          else Plotly.purge(one.plot);
          parallels.delete(one.plot);
        }
        this.root.remove();
      }
    }

    async function ask(path) {
      const answer = await fetch(path, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
      return answer.json();
    }

    // Each GPU of each host has its running sessions, or else the newest that ended.
    function defaults(sessions) {
      const shown = new Set(sessions.filter((one) => one.state === "running").map((one) => one.name));
      const places = new Set();
      const place = (one) => `${one.database}\n${one.host}\n${one.device}`;
      for (const one of sessions) if (shown.has(one.name)) places.add(place(one));
      for (const one of sessions) {
        if (!places.has(place(one))) {
          places.add(place(one));
          shown.add(one.name);
        }
      }
      return shown;
    }

    function listSessions(sessions, shown) {
      const rows = sessions.map((session) => {
        const box = element("input", { type: "checkbox", checked: shown.has(session.name) });
        box.dataset.session = session.name;
        box.setAttribute("aria-label", `show ${session.kernel} ${session.problem}`);
        const cell = element("td", {}, box);
        const left = session.state === "running" ? session.progress?.left ?? "" : "";
        const figures = [session.trials.toLocaleString("en"), session.elapsed]
          .map((text) => element("td", { textContent: text, className: "number" }));
        return row([cell, session.kernel, session.problem, session.device, session.host, session.state, ...figures, left,
          session.database]);
      });
      const focused = document.activeElement?.dataset?.session;
      byId("sessions").replaceChildren(...rows);
      if (focused) byId("sessions").querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
    }

    byId("sessions").addEventListener("change", (event) => {
      chosen.set(event.target.dataset.session, event.target.checked);
    });

    let listed = "";

    async function poll() {
      const { databases, sessions } = await ask("state");
      const messages = databases.filter((one) => one.message).map((one) => `${one.location}: ${one.message}`);
      if (byId("messages").textContent !== messages.join("")) {
        byId("messages").replaceChildren(...messages.map((text) => element("li", { textContent: text })));
      }
      const shown = defaults(sessions);
      for (const [name, isShown] of chosen) isShown ? shown.add(name) : shown.delete(name);
      const list = JSON.stringify([sessions, [...shown]]);
      if (list !== listed) listSessions(sessions, shown);
      listed = list;
      for (const [name, column] of columns) {
        if (!shown.has(name) || !sessions.some((one) => one.name === name)) {
          column.remove();
          columns.delete(name);
        }
      }
      for (const session of sessions) {
        if (!shown.has(session.name)) continue;
        if (!columns.has(session.name)) {
          columns.set(session.name, new Column(session.name));
          byId("columns").append(columns.get(session.name).root);
        }
        columns.get(session.name).list(session);
      }
      byId("columns").dataset.count = columns.size;
      await Promise.all(sessions.filter((one) => columns.has(one.name)).map((one) => columns.get(one.name).update(one)));
      const running = sessions.filter((one) => one.state === "running").length;
      document.title = running ? `(${running}) autotile watch` : "autotile watch";
      return running ? `${running} running` : "nothing is running";
    }

    async function follow() {
      let wait = POLL_MS;
      if (!document.hidden) {
        try {
          byId("connection").textContent = await poll();
          byId("connection").dataset.state = "connected";
        } catch (error) {
          byId("connection").textContent = "autotile watch cannot be reached: it has ended, or its host is asleep";
          byId("connection").dataset.state = "lost";
          wait = RETRY_MS;
        }
      }
      setTimeout(follow, wait);
    }

    document.addEventListener("visibilitychange", () => { if (!document.hidden) inView.takeRecords(); });
    ask("palette").then(setColours).finally(follow);
  }

  if (document.body.classList.contains("watch")) watch();
  else report();
})();
