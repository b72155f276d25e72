// The table of the selected documents. All that comes from documents enters the page as text, never as markup.

const MARKED = 0.55; // how strongly the highest value of a text is shaded

/** A new element with attributes and children; strings become text. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The lines of JSON that a data block holds, compressed. */
async function unpack(id) {
  const block = document.getElementById(id);
  if (!block || !block.textContent.trim()) return [];
  const bytes = Uint8Array.from(atob(block.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const text = await new Response(stream).text();
  return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

/** One object a document, from columns of some hundred of them. */
function readDocuments(chunks) {
  const sources = [];
  const documents = [];
  for (const chunk of chunks) {
    sources.push(...chunk.sources);
    const scores = Object.values(chunk.scores);
    chunk.p.forEach((p, i) => {
      const source = sources[chunk.source[i]];
      const place = `${source}:${chunk.row[i]}`;
      const id = chunk.ids[i] === null ? `${source}#${chunk.row[i]}` : chunk.ids[i];
      const text = chunk.text ? chunk.text[i] : null;
      const picture = chunk.thumbs ? chunk.thumbs[i] : null;
      const own = scores.map((values) => values[i]);
      documents.push({ at: documents.length, id, p, place, source, text, picture, scores: own });
    });
  }
  const [first] = chunks;
  return { documents, sources, names: first ? Object.keys(first.scores) : [], pName: first ? first.p_name : "p-value" };
}

const shown = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/** How DataTables shows, sorts and searches a column; what it shows is a node, so it never reads markup. */
function column(title, value, { node, numeric = false, className = "" } = {}) {
  const render = (document_, type) => {
    const content = value(document_);
    if (type === "display") return node ? node(document_) : make("span", {}, numeric ? shown(content) : content);
    if (type === "filter") return escaped(numeric ? shown(content) : content);
    return numeric && content === null ? -Infinity : content;
  };
  return { title, data: null, render, className, type: numeric ? "num" : "string" };
}

/** The picture of a document, as the page has it: a small JPEG file. */
function thumbnail(one) {
  if (!one.picture) return [];
  return [make("img", { src: `data:image/jpeg;base64,${one.picture}`, alt: "thumbnail", class: "thumbnail" })];
}

function columns(pName, names, texts) {
  const bdi = (text) => make("bdi", {}, text);
  return [
    column("rank", (one) => one.at + 1, { numeric: true, className: "n" }),
    column("document", (one) => one.id, {
      className: "id",
      node: (one) => make("button", { type: "button", class: "opener", "aria-expanded": "false" }, bdi(one.id)),
    }),
    column(pName, (one) => one.p, { numeric: true, className: "n" }),
    ...names.map((name, i) => column(name, (one) => one.scores[i], { numeric: true, className: "n score" })),
    ...(texts
      ? [
          column("text", (one) => one.text || "", {
            className: "begins",
            node: (one) => make("span", { dir: "auto" }, ...thumbnail(one), one.text || (one.picture ? "" : "text not available")),
          }),
        ]
      : [column("place", (one) => one.place, { className: "begins", node: (one) => bdi(one.place) })]),
  ];
}

// --- one document

/** The pieces of a text, darker where the value is higher, and grey where there is none. */
function shadedText(tokens) {
  const known = tokens.values.filter((value) => value !== null).sort((a, b) => a - b);
  const low = known[Math.floor(0.05 * (known.length - 1))];
  const high = known[Math.ceil(0.95 * (known.length - 1))];
  const text = make("p", { class: "excerpt", dir: "auto" });
  tokens.pieces.forEach((piece, i) => {
    const value = tokens.values[i];
    const span = make("span", {}, piece);
    if (value !== null && value !== undefined) {
      const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0;
      span.className = "token";
      span.style.setProperty("--share", `${Math.round(100 * MARKED * share)}%`);
      span.title = String(value);
    } else {
      span.className = "soft";
      span.title = "not scored";
    }
    text.append(span);
  });
  const grey = tokens.pieces.some((piece, i) => piece.trim() && typeof tokens.values[i] !== "number") ? ", grey is not scored" : "";
  const scale = make("p", { class: "soft" }, `Shaded by ${tokens.kind}, which ${tokens.detector} reads: `);
  for (const [value, share] of [[low, 0], [high, 1]]) {
    const end = make("span", { class: "token" }, ` ${value} `);
    end.style.setProperty("--share", `${Math.round(100 * MARKED * share)}%`);
    scale.append(end, share ? `; darker is higher${grey}. It shows how the score came about and proves nothing.` : " to ");
  }
  return known.length ? [scale, text] : [text];
}

function listed(title, items) {
  return [make("dt", {}, title), make("dd", {}, ...items.map((item) => make("bdi", { class: "item" }, item)))];
}

function details(one, names, tokens) {
  const facts = make("dl", { class: "facts" });
  facts.append(...listed("stands in", [one.place]));
  facts.append(...listed("scores", names.map((name, i) => `${name} = ${shown(one.scores[i])}`)));
  const box = make("div", { class: "opened" });
  if (tokens) {
    if (tokens.by && tokens.score !== null) facts.append(...listed("ranked by", [`${tokens.by} = ${shown(tokens.score)}`]));
    facts.append(...listed("near-duplicates", tokens.copies.length ? tokens.copies : ["none known"]));
  }
  if (tokens && tokens.pieces) box.append(...shadedText(tokens));
  else if (one.picture) box.append(make("p", { class: "excerpt", dir: "auto" }, ...thumbnail(one), one.text));
  else if (one.text !== null) box.append(make("p", { class: "excerpt", dir: "auto" }, one.text || "text not available"));
  box.append(facts);
  return box;
}

// --- the table

let count = 0;

function labelled(text, control) {
  const id = `filter-${(count += 1)}`;
  control.id = id;
  return make("span", { class: "filter" }, make("label", { for: id }, text), control);
}

/** Filters beside the search: by input, by p-value, and by whether the tokens are shown. */
function filters(table, sources, evidence, pName) {
  const row = make("div", { class: "filters" });
  const most = make("input", { type: "number", min: "0", max: "1", step: "any", inputmode: "decimal" });
  row.append(labelled(`${pName} at most`, most));
  most.addEventListener("input", () => {
    const limit = most.value === "" ? Infinity : Number(most.value);
    table.search.fixed("p", (_, one) => one.p <= limit).draw();
  });
  if (sources.length > 1) {
    const chosen = make("select", {}, make("option", { value: "" }, "all"));
    sources.forEach((source, i) => chosen.append(make("option", { value: String(i) }, source)));
    chosen.addEventListener("change", () => {
      const wanted = chosen.value === "" ? null : sources[Number(chosen.value)];
      table.search.fixed("source", (_, one) => wanted === null || one.source === wanted).draw();
    });
    row.append(labelled("input", chosen));
  }
  if (evidence.size) {
    const only = make("input", { type: "checkbox" });
    only.addEventListener("change", () => {
      table.search.fixed("tokens", (_, one) => !only.checked || evidence.has(one.at)).draw();
    });
    row.append(labelled("only with tokens", only));
  }
  return row;
}

async function build(place) {
  const name = place.dataset.documents;
  const { documents, sources, names, pName } = readDocuments(await unpack(`rows-${name}`));
  const evidence = new Map((await unpack(`tokens-${name}`)).map((tokens) => [tokens.at, tokens]));
  const element = make("table", { class: "documents", "aria-label": `Selected documents of ${name}` });
  place.replaceChildren(element);
  const texts = documents.length > 0 && documents[0].text !== null;
  const table = new DataTable(element, {
    data: documents,
    columns: columns(pName, names, texts),
    order: [],
    pageLength: 25,
    lengthMenu: [10, 25, 100, 500],
    autoWidth: false,
    deferRender: true,
    layout: { topStart: "pageLength", topEnd: "search", bottomStart: "info", bottomEnd: "paging" },
    language: {
      search: "search",
      lengthMenu: "_MENU_ a page",
      info: "_START_ to _END_ of _TOTAL_",
      infoFiltered: "(of _MAX_)",
      infoEmpty: "none",
      zeroRecords: "No document matches.",
    },
  });
  place.prepend(filters(table, sources, evidence, pName));
  element.addEventListener("click", (event) => {
    const button = event.target.closest("button.opener");
    if (!button) return;
    const row = table.row(button.closest("tr"));
    const open = row.child.isShown();
    if (open) row.child.hide();
    else row.child(details(row.data(), names, evidence.get(row.data().at)), "details").show();
    button.setAttribute("aria-expanded", String(!open));
  });
}

/** Tables are built when they come near the window: a page of many selections opens as fast as one of one. */
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((one) => one.isIntersecting)) {
    watcher.unobserve(entry.target);
    build(entry.target).catch((error) => entry.target.replaceChildren(`This browser cannot show the table: ${error}`));
  }
}, { rootMargin: "400px" });
for (const place of document.querySelectorAll("[data-documents]")) watcher.observe(place);

/** A link into a fold opens it. */
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  target?.scrollIntoView();
}
addEventListener("hashchange", reveal);
if (location.hash) reveal();
document.documentElement.classList.add("scripted");
