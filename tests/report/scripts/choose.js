// Choose the second entry of the first list that a selector finds, and return its text.
const select = document.querySelectorAll(arguments[0])[0];
select.selectedIndex = 1;
select.dispatchEvent(new Event('change'));
return select.selectedOptions[0].textContent;
