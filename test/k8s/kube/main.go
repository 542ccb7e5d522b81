// Command kube is all of Kubernetes in one program, which is built and linked once. The
// first argument, or the name by which the program is called, selects the part:
//
//	kube kubelet --config=...
//	ln -s kube kubectl
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var parts = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": manager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"dns":                     newDNSCommand,
}

func main() {
	part := filepath.Base(os.Args[0])
	if part == "kube" && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		part = os.Args[0]
	}
	switch make := parts[part]; {
	case part == "etcd":
		etcdmain.Main(os.Args)
	case make == nil:
		fmt.Fprintf(os.Stderr, "usage: kube PART ..., PART being etcd or one of %v\n", slices.Sorted(maps.Keys(parts)))
		os.Exit(2)
	case part == "kubectl":
		// CheckErr prints kubectl's errors in kubectl's words.
		if err := cli.RunNoErrOutput(make()); err != nil {
			kubectlutil.CheckErr(err)
		}
	default:
		os.Exit(cli.Run(make()))
	}
}
