package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is the release. The Makefile sets version with -ldflags -X.
var version = "0.1.0-dev"

// versionInfo is the output of `penstock version`.
type versionInfo struct {
	Version  string `json:"version" yaml:"version"`
	Revision string `json:"revision,omitempty" yaml:"revision,omitempty"`
	Go       string `json:"go" yaml:"go"`
	Platform string `json:"platform" yaml:"platform"`
}

func buildVersion() versionInfo {
	v := versionInfo{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	return v
}

func newVersion() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary",
		Example: `  penstock version
  penstock version --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := buildVersion()
			return out.print(cmd.OutOrStdout(), v, func(t *table) {
				t.row("version", v.Version)
				if v.Revision != "" {
					t.row("revision", v.Revision)
				}
				t.row("go", v.Go)
				t.row("platform", v.Platform)
			})
		},
	}
	out.flag(cmd)
	return cmd
}
