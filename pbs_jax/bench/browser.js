// The list of questions in a report: reads the JSON beside it, filters, shows a page at a time. No network, no storage.
(() => {
  const data = JSON.parse(document.getElementById("answers").textContent);
  const PAGE = 24;
  const filters = document.getElementById("filters");
  const list = document.getElementById("items");
  const more = document.getElementById("more");
  let found = [], shown = 0;

  const make = (tag, text, kind) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };

  const select = (name, options) => {
    const label = make("label", name), box = make("select");
    for (const [value, text] of options) box.append(new Option(text, value));
    box.addEventListener("change", show);
    label.append(box);
    filters.append(label);
    return box;
  };

  const values = (key) => [["", "all"], ...[...new Set(data.items.map((item) => item[key]))].filter(Boolean).sort().map((v) => [v, v])];
  const fields = Object.fromEntries(["track", "type", "task", "source"].map((key) => [key, values(key)]).filter(([, v]) => v.length > 2)
    .map(([key, v]) => [key, select(key, v)]));
  const model = select("model", [["", "any"], ...data.rows.map((name, k) => [String(k), name])]);
  const verdict = select("answer", [["", "all"], ["right", "right"], ["wrong", "wrong"], ["partly", "partly (open)"],
    ["invalid", "can't be read"], ["differ", "models differ"]]);
  const search = make("input");
  search.type = "search";
  search.placeholder = "words";
  search.addEventListener("input", show);
  const label = make("label", "search");
  label.append(search);
  filters.append(label);

  function fits(item) {
    for (const key in fields) if (fields[key].value && item[key] !== fields[key].value) return false;
    const answers = (model.value === "" ? item.answers : [item.answers[Number(model.value)]]).filter(Boolean);
    if (verdict.value === "differ") {
      if (new Set(item.answers.filter(Boolean).map((a) => a[1])).size < 2) return false;
    } else if (verdict.value && !answers.some((a) => a[1] === verdict.value)) return false;
    const words = search.value.trim().toLowerCase();
    return !words || [item.question, item.gold, item.id, item.image, ...item.options, ...answers.map((a) => a[0])]
      .some((text) => text.toLowerCase().includes(words));
  }

  function card(item) {
    const node = make("article", undefined, "item"), body = make("div");
    if (data.images[item.image]) {
      const image = make("img");
      image.src = data.images[item.image];
      image.alt = "picture of the question";
      image.width = image.height = 112;
      node.append(image);
    } else node.append(make("div", "no image", "blank"));
    body.append(make("p", [item.track, item.type, item.task, item.source, item.id].filter(Boolean).join(" · "), "kind"));
    body.append(make("p", item.question, "q"));
    if (item.options.length) {
      const options = make("ul", undefined, "options");
      item.options.forEach((text, k) => options.append(make("li", "ABCDEFGH"[k] + " " + text, text === item.gold ? "gold" : "")));
      body.append(options);
    } else body.append(make("p", item.gold, "expected"));
    const sides = make("div", undefined, "sides");
    item.answers.forEach((answer, k) => {
      const side = make("div", undefined, "side " + (answer ? answer[1] : ""));
      side.append(make("b", data.rows[k]));
      if (!answer) side.append(make("small", "not asked, or an error"));
      else {
        side.append(make("div", answer[0] || "(nothing)", "long"));
        if (answer[3]) side.append(make("small", "read as " + answer[3]));
        side.append(make("i", answer[2]));
      }
      sides.append(side);
    });
    body.append(sides);
    node.append(body);
    return node;
  }

  function next() {
    list.append(...found.slice(shown, shown + PAGE).map(card));
    shown = Math.min(shown + PAGE, found.length);
    more.hidden = shown >= found.length;
  }

  function show() {
    found = data.items.filter(fits);
    shown = 0;
    list.replaceChildren();
    const drawn = data.items.length < data.total ? `, drawn by hash from ${data.total.toLocaleString("en")}` : "";
    document.getElementById("count").textContent =
      `${found.length.toLocaleString("en")} of ${data.items.length.toLocaleString("en")} questions${drawn}`;
    next();
  }

  more.addEventListener("click", next);
  show();
})();
