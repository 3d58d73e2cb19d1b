// Return what a screen reader needs to find its way.
const all = (selector) => [...document.querySelectorAll(selector)];
return {
  language: document.documentElement.lang,
  unnamed: all('.plot').filter(p => !document.getElementById(p.getAttribute('aria-labelledby'))).length,
  withoutNumbers: all('figure.chart').filter(f => !f.querySelector('details table'))
    .map(f => f.querySelector('h3').textContent),
  levels: all('h1, h2, h3').map(h => Number(h.tagName[1])),
  unlabelled: all('input, select, button').filter(e => !e.labels?.length && !e.ariaLabel && !e.textContent).length,
};
