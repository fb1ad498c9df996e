"""The plots of a sweep, in the order of the page."""

from pipeline.report import curve_plots, setting_plots
from pipeline.report.html_page import Plot
from pipeline.report.sweep_result import SweepResult


def draw(sweep: SweepResult) -> list[Plot]:
    """Return every plot for which the sweep has data."""
    plots = [
        *curve_plots.metric_plots(sweep),
        curve_plots.difference_plot(sweep),
        *setting_plots.final_plots(sweep),
        curve_plots.rate_plot(sweep),
        *setting_plots.target_plots(sweep),
        *setting_plots.cost_plots(sweep),
        *setting_plots.loss_by_rate_plots(sweep),
        setting_plots.noise_by_batch_plot(sweep),
        curve_plots.noise_plot(sweep),
    ]
    return [plot for plot in plots if plot.has_points()]
