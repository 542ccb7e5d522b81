package clients

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// kgoPackage is the package of franz-go's client, whose own tests TestKgo runs.
const kgoPackage = "github.com/twmb/franz-go/pkg/kgo"

// kgoFails are the tests of kgo that can't pass, and why.
var kgoFails = map[string]string{
	"TestConsumeRegex":                           "expects the topic __consumer_offsets; offsets lie in the streams",
	"TestIssueFetchLargerThanBrokerMaxReadBytes": "sets max.message.bytes to 10 MiB; a batch has at most 8 MiB",
}

// kgoEndless are the tests of kgo that can't pass and do not end, and why.
var kgoEndless = map[string]string{
	"TestTxnEtl": "needs transactions, and waits for them for ever",
}

// kgoLine is the outcome of a test in the output of a test program.
var kgoLine = regexp.MustCompile(`(?m)^ *--- (PASS|FAIL|SKIP): (\S+) `)

// TestKgo runs the tests of kgo against a 'penstock up' and against three gateways, there also with
// connections that break all the time (KGO_TEST_CHAOS). Every test that fails must be in kgoFails, and
// every test in kgoFails must fail.
func TestKgo(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Minute)
	defer cancel()
	suite := filepath.Join(t.TempDir(), "kgo.test")
	if out, err := exec.CommandContext(ctx, "go", "test", "-c", "-o", suite, kgoPackage).CombinedOutput(); err != nil {
		t.Fatalf("the tests of kgo can't be built: %v\n%s", err, out)
	}
	dir, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", kgoPackage).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name     string // short: sockets lie below the directory of the test
		gateways int
		chaos    bool
	}{{"one", 1, false}, {"three", 3, false}, {"chaos", 3, true}} {
		t.Run(c.name, func(t *testing.T) {
			s := startServer(t)
			seeds := []string{s.addr}
			for i := 1; i < c.gateways; i++ {
				seeds = append(seeds, s.gateway(t, fmt.Sprint("kgo-", i)))
			}
			args := []string{"-test.v", "-test.timeout", "15m", "-test.skip", "^(" + strings.Join(slices.Collect(maps.Keys(kgoEndless)), "|") + ")$"}
			if c.chaos {
				args = append(args, "-test.run", "^TestGroupETL$") // the test that breaks connections
			}
			cmd := exec.CommandContext(ctx, suite, args...)
			cmd.Dir = string(bytes.TrimSpace(dir)) // a test reads the sources
			cmd.Env = append(os.Environ(), "KGO_SEEDS="+strings.Join(seeds, ","), fmt.Sprint("KGO_TEST_RF=", c.gateways), "KGO_TEST_RECORDS=50000", "KGO_LOG_LEVEL=none")
			if c.chaos {
				cmd.Env = append(cmd.Env, "KGO_TEST_CHAOS=1")
			}
			out, err := cmd.CombinedOutput()
			kgoOutcome(t, out, err, c.chaos)
		})
	}
}

// kgoOutcome compares what the tests of kgo have printed with the lists above. some: not all tests were
// run.
func kgoOutcome(t *testing.T, out []byte, err error, some bool) {
	t.Helper()
	failed, count := map[string]bool{}, map[string]int{}
	for _, m := range kgoLine.FindAllSubmatch(out, -1) {
		outcome, name := string(m[1]), string(m[2])
		count[outcome]++
		if outcome == "FAIL" {
			failed[name] = true
		}
	}
	for name := range failed {
		if kgoFails[name] == "" {
			t.Errorf("%s fails", name)
		}
	}
	for name, why := range kgoFails {
		if !failed[name] && !some {
			t.Errorf("%s passes, and is in the list of those that can't pass: %s", name, why)
		}
	}
	if count["PASS"] == 0 || err != nil && len(failed) == 0 {
		t.Errorf("the tests of kgo did not come to their end: %v", err)
	}
	if t.Failed() {
		file := filepath.Join(os.TempDir(), "penstock-kgo.log")
		if err := os.WriteFile(file, out, 0o600); err != nil {
			t.Error(err)
		}
		t.Logf("the output is in %s", file)
	}
	t.Logf("%d passed, %d were skipped, %d failed: %v", count["PASS"], count["SKIP"], count["FAIL"], slices.Sorted(maps.Keys(failed)))
}
