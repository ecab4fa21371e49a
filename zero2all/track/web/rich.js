// What a run wrote beside numbers: generated text, pictures, histograms, each over the steps of the run.

import { color } from './chart.js';
import { h, span } from './dom.js';
import { number, whole } from './format.js';
import { get, link } from './server.js';
import { t } from './words.js';

const NAMES = 12;

// One card per name; `kind` is text, image or histogram.
export function richCards(info, kind) {
	const names = Object.entries(info.rich[kind] ?? {});
	return names.slice(0, NAMES).map(([name, many]) => {
		const body = h('div', { class: 'rich' });
		const card = h('article', { class: 'card', data: { rich: kind, name } }, h('header', {}, h('h3', { title: name }, name || kind), span('at', t('lastSteps', { count: many }))), body);
		new IntersectionObserver(async (entries, observer) => {
			if (!entries.some((entry) => entry.isIntersecting)) return;
			observer.disconnect();
			const { values } = await get('rich', { id: info.id, kind, name });
			if (values.length) SHOW[kind](body, info, values, card.querySelector('.at'));
		}).observe(card);
		return card;
	});
}

// A slider over the steps; the arrow keys move it.
function overSteps(body, values, at, show) {
	const content = h('div', { class: 'content' });
	const pick = async (place) => {
		at.textContent = `${t('step')} ${whole(values[place].step)} · ${place + 1} / ${values.length}`;
		await show(content, values[place]);
	};
	const slider = h('input', { type: 'range', min: 0, max: values.length - 1, value: values.length - 1, 'aria-label': t('step'), oninput: (event) => pick(Number(event.target.value)) });
	body.replaceChildren(...(values.length > 1 ? [slider] : []), content);
	return pick(values.length - 1);
}

const SHOW = {
	text: (body, info, values, at) =>
		overSteps(body, values, at, async (content, { i }) => {
			const { data } = await get('event', { id: info.id, i });
			content.replaceChildren(h('pre', { class: 'sample', tabIndex: 0 }, String(data.text ?? '')));
		}),
	image: (body, info, values, at) =>
		overSteps(body, values, at, (content, { i, step, width, height }) => {
			content.replaceChildren(h('img', { src: link('media', { id: info.id, i }), alt: `${values[0].name ?? ''} ${t('step')} ${whole(step)}`, width: Number(width) || undefined, height: Number(height) || undefined }));
		}),
	histogram: (body, info, values) => heatMap(body, values),
};

// Histograms side by side: a column per step, darker where there is more.
function heatMap(body, values) {
	const good = values.filter(({ edges, counts }) => Array.isArray(edges) && Array.isArray(counts) && edges.length === counts.length + 1 && counts.length);
	if (!good.length) return;
	const low = Math.min(...good.map(({ edges }) => edges[0]));
	const high = Math.max(...good.map(({ edges }) => edges.at(-1)));
	const about = `${number(low)} … ${number(high)} · ${t('step')} ${whole(good[0].step)} – ${whole(good.at(-1).step)}`;
	const canvas = h('canvas', { class: 'heat', width: 720, height: 240, role: 'img', 'aria-label': `${t('histograms')}: ${about}` });
	body.replaceChildren(canvas, h('p', { class: 'hint' }, about));
	const context = canvas.getContext('2d');
	const y = (value) => canvas.height * (1 - (value - low) / (high - low || 1));
	const width = canvas.width / good.length;
	context.fillStyle = color(0);
	good.forEach(({ edges, counts }, place) => {
		const densities = counts.map((many, bin) => many / Math.max(edges[bin + 1] - edges[bin], 1e-12));
		const most = Math.max(...densities, 1e-12);
		densities.forEach((density, bin) => {
			context.globalAlpha = Math.sqrt(Math.max(0, density) / most);
			context.fillRect(place * width, y(edges[bin + 1]), Math.ceil(width), Math.ceil(y(edges[bin]) - y(edges[bin + 1])));
		});
	});
}
