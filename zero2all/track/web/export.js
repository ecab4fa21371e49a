// Taking things away: a chart as PNG, its points as CSV.

import { css, h } from './dom.js';
import { link } from './server.js';
import { t } from './words.js';

function save(url, name) {
	const anchor = h('a', { href: url, download: name });
	document.body.append(anchor);
	anchor.click();
	anchor.remove();
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}._-]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 80) || 'chart';

// The plot with a title above and a legend below, on the colour of the page.
export function pngOf(chart, { title, unit }) {
	if (!chart?.plot) return;
	const source = chart.plot.ctx.canvas;
	const ratio = uPlot.pxRatio;
	const [head, foot, edge] = [34 * ratio, 26 * ratio, 12 * ratio];
	const canvas = h('canvas', { width: source.width + 2 * edge, height: source.height + head + foot });
	const context = canvas.getContext('2d');
	const font = css('--font');
	context.fillStyle = css('--panel');
	context.fillRect(0, 0, canvas.width, canvas.height);
	context.textBaseline = 'middle';
	context.fillStyle = css('--ink');
	context.font = `600 ${14 * ratio}px ${font}`;
	context.fillText(`${title}${unit && ` (${t(unit)})`}${chart.isDiff ? ` (${t('diff')})` : ''}`, edge, head / 2);
	context.drawImage(source, edge, head);
	context.font = `${11 * ratio}px ${font}`;
	let x = edge;
	for (const line of chart.drawn()) {
		const width = context.measureText(line.label).width;
		if (x + width > canvas.width - edge) break;
		const y = head + source.height + foot / 2;
		context.fillStyle = line.color;
		context.fillRect(x, y - 4 * ratio, 8 * ratio, 8 * ratio);
		context.fillStyle = css('--ink-2');
		context.fillText(line.label, x + 12 * ratio, y);
		x += width + 28 * ratio;
	}
	canvas.toBlob((blob) => {
		const url = URL.createObjectURL(blob);
		save(url, `${fileName(title)}.png`);
		setTimeout(() => URL.revokeObjectURL(url), 10000);
	});
}

// Every point, not what was drawn; one file per run.
export function saveCsv(chart) {
	if (!chart) return;
	for (const id of new Set(chart.lines.map((line) => line.run))) {
		const values = new URLSearchParams({ id });
		for (const line of chart.lines) if (line.run === id) values.append('metric', line.metric);
		save(link('csv', values), `${fileName(`${id} ${chart.spec.title}`)}.csv`);
	}
}
