// Return the charts whose buttons touch their legends.
return [...document.querySelectorAll('.plot')].filter(plot => {
  const buttons = plot.querySelector('.modebar')?.getBoundingClientRect();
  return buttons && [...plot.querySelectorAll('.legend .traces')].some(one => {
    const place = one.getBoundingClientRect();
    return place.right > buttons.left && place.bottom > buttons.top && place.top < buttons.bottom;
  });
}).map(plot => plot.id)
