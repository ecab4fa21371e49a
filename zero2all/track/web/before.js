// Runs before anything is painted: the theme, and a language for uPlot where its number formatter refuses the browser's.
{
	const asked = new URLSearchParams(location.hash.slice(1)).get('theme') || localStorage.getItem('z2a-theme');
	const dark = asked ? asked === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
	document.documentElement.dataset.theme = dark ? 'dark' : 'light';
	try {
		new Intl.NumberFormat(navigator.language);
	} catch {
		Object.defineProperty(navigator, 'language', { value: 'en-US', configurable: true });
	}
}
