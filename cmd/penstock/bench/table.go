package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// WriteTable prints the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "Linux %s, %d processors; medians of %d rounds", r.Kernel, r.CPUs, r.Rounds)
	if r.Scale != 1 {
		fmt.Fprintf(w, "; sizes and counts x %g", r.Scale)
	}
	fmt.Fprintln(w, "\nCPU: of the whole machine (of this tool and the servers), for each GB, operation or run")
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	two := len(r.Results) > 0 && len(r.Results[0].Sides) == 2
	if two {
		fmt.Fprintf(t, "row\t%s\t%s\tratio\tCPU, first\tCPU, second\n", "first", "second")
	} else {
		fmt.Fprintln(t, "row\tvalue\tCPU")
	}
	for _, res := range r.Results {
		fmt.Fprintf(t, "%s", res.Row)
		for _, s := range res.Sides {
			fmt.Fprintf(t, "\t%s", valueText(res.Unit, s.Value))
		}
		if two {
			fmt.Fprintf(t, "\t%s", ratioText(res.Unit, res.Ratio))
		}
		for _, s := range res.Sides {
			fmt.Fprintf(t, "\t%s (%s)", cpuText(res.Unit, s.CPUMachine), cpuText(res.Unit, s.CPUProcesses))
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	if len(r.Results) > 0 {
		for i, s := range r.Results[0].Sides {
			fmt.Fprintf(w, "%s: %s\n", []string{"first", "second"}[i], s.Dir)
		}
	}
	return nil
}

func valueText(u Unit, v float64) string {
	switch {
	case u == Seconds:
		return fmt.Sprintf("%.2f s", v)
	case v < 100:
		return fmt.Sprintf("%.1f %s", v, u)
	}
	return fmt.Sprintf("%.0f %s", v, u)
}

// ratioText formats a ratio: times as long for seconds, else a share of the second directory's
// speed.
func ratioText(u Unit, v float64) string {
	if u == Seconds {
		return fmt.Sprintf("%.1f times", v)
	}
	return fmt.Sprintf("%.3f", v)
}

func cpuText(u Unit, v float64) string {
	switch u {
	case MegabytesPerSecond:
		return fmt.Sprintf("%.2f s/GB", v)
	case PerSecond:
		return fmt.Sprintf("%.1f µs", v*1e6)
	}
	return fmt.Sprintf("%.2f s", v)
}
