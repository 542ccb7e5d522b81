package hold

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// partEnv, an environment variable, makes this binary a process that plays a part in a test: the
// value names one of parts.
const partEnv = "PENSTOCK_HOLD_PART"

var parts = map[string]func(arg string) error{}

func TestMain(m *testing.M) {
	if name := os.Getenv(partEnv); name != "" {
		if err := parts[name](os.Args[1]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child prepares a part; the caller ends the part with Run, or Start and Wait.
func child(t *testing.T, name, arg string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], arg)
	cmd.Env = append(os.Environ(), partEnv+"="+name)
	cmd.WaitDelay = time.Second
	return cmd
}
