package csi

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
)

// mayBeSkipped are the specs of the suite that don't concern this driver, by a piece of their
// names. Everything else must run.
var mayBeSkipped = []string{
	"publishing more volumes than the node max attach limit", // no such limit exists
	"creating a snapshot with accessibility requirements",    // a snapshot is in the place of its volume
	"pagination should detect volumes added between pages",   // pending in the suite itself
}

// TestSanity runs the suite of github.com/kubernetes-csi/csi-test against the driver on a
// cluster with certificates and nodes. The node part has an administrator's certificate: some
// specs stage volumes that they did not publish to the node.
func TestSanity(t *testing.T) {
	r := newSecureRig(t)
	r.drive(nil)
	cfg := sanity.NewTestConfig()
	cfg.Address = "unix://" + r.socket()
	cfg.TargetPath, cfg.StagingPath = r.path("sanity-target"), r.path("sanity-staging")
	cfg.TestVolumeSize, cfg.TestVolumeExpandSize = 64<<20, 128<<20
	cfg.TestVolumeParameters = map[string]string{"replicas": "1", "attachPath": "/kubernetes/sanity/{volume}"}
	cfg.TestVolumeMutableParameters = map[string]string{"noatime": "true"}
	cfg.IdempotentCount = 3
	cfg.RemoveTargetPath, cfg.RemoveStagingPath = os.RemoveAll, os.RemoveAll
	sc := sanity.GinkgoTest(&cfg)
	t.Cleanup(sc.Finalize)
	gomega.RegisterFailHandler(ginkgo.Fail)

	passed := 0
	ginkgo.ReportAfterSuite("what ran", func(report ginkgo.Report) {
		for _, s := range report.SpecReports {
			switch {
			case s.LeafNodeType != types.NodeTypeIt:
			case s.State.Is(types.SpecStatePassed):
				passed++
			case s.State.Is(types.SpecStateSkipped | types.SpecStatePending):
				if !slices.ContainsFunc(mayBeSkipped, func(piece string) bool { return strings.Contains(s.FullText(), piece) }) {
					t.Errorf("skipped: %s: %s", s.FullText(), s.Failure.Message)
				}
			}
		}
	})
	suite, reporter := ginkgo.GinkgoConfiguration()
	reporter.NoColor, reporter.Succinct = true, true
	if !ginkgo.RunSpecs(t, "csi-sanity", suite, reporter) {
		t.Fail()
	}
	t.Logf("%d specs passed", passed)
	const least = 100
	if passed < least {
		t.Errorf("%d specs passed, fewer than the %d that there were", passed, least)
	}
	if g := r.granted(); len(g) > 0 {
		t.Errorf("granted still: %q", g)
	}
	r.clean()
}
