// Package upstream runs Kubernetes' own storage tests for drivers described by a file
// (-storage.testdriver), without the rest of Kubernetes' end-to-end tests, which would
// take ten times as long to build. Without such a file it has no tests.
package upstream

import (
	"flag"
	"os"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	_ "k8s.io/component-base/logs/testinit" // flags of logs
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	_ "k8s.io/kubernetes/test/e2e/framework/node/init" // nodes are looked at before and after a test
	_ "k8s.io/kubernetes/test/e2e/storage/external"    // the tests
	_ "k8s.io/kubernetes/test/utils/format"            // objects in messages
)

func TestMain(m *testing.M) {
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	framework.AfterReadingAllFlags(&framework.TestContext)
	os.Exit(m.Run())
}

func TestStorage(t *testing.T) {
	gomega.RegisterFailHandler(framework.Fail)
	suite, reporter := framework.CreateGinkgoConfig()
	ginkgo.RunSpecs(t, "storage", suite, reporter)
}
