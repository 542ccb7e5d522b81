package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/kube"
	"penstock.io/penstock/csi"
	"penstock.io/penstock/meta"
)

// guardFlags are the flags of `penstock csi guard`.
type guardFlags struct {
	wait  time.Duration
	every time.Duration // between two checks
}

func newCSIGuard() *cobra.Command {
	g := guardFlags{every: 2 * time.Second}
	cmd := &cobra.Command{
		Use:   "guard",
		Short: "Fail as long as pods of Kubernetes use volumes of the driver",
		Long: `Asks Kubernetes whether a pod on any node has a volume of this driver, or a volume is
still attached to a node, and fails with their names if so: without the driver such
pods lose their mounts when they start anew or the driver's pods go, and can't be
deleted in order. The chart runs this command before a release is uninstalled, in a pod
whose service account may list pods, persistent volumes and volume attachments. If
Kubernetes does not answer, the command fails as well.

--wait makes the command ask again for so long: volumes of pods that were just deleted
are detached within seconds.`,
		Example: `  kubectl -n penstock-system exec deploy/penstock-controller -c penstock -- /penstock csi guard
  penstock csi guard --wait 2m`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := kube.InPod(kube.AccountDir, os.Getenv)
			if err != nil {
				return err
			}
			if err := g.guard(cmd.Context(), api); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "no pod uses a volume of %s\n", csi.Name)
			return nil
		},
	}
	cmd.Flags().DurationVar(&g.wait, "wait", 0, "how long to wait until no pod uses a volume, such as 2m")
	return cmd
}

// guard waits until no pod uses a volume of the driver and no volume is attached. Errors: Busy
// (with the users' names), AccessDenied, Unavailable.
func (g *guardFlags) guard(ctx context.Context, api *kube.API) error {
	for end := time.Now().Add(g.wait); ; {
		users, err := usersOf(ctx, api, csi.Name)
		if err == nil && len(users) == 0 {
			return nil
		}
		if err == nil {
			err = usedBy(users)
		}
		if meta.KindOf(err) == meta.AccessDenied || !time.Now().Before(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(g.every):
		}
	}
}

// usersTold bounds the users of volumes named in an error.
const usersTold = 20

func usedBy(users []string) error {
	told := users[:min(len(users), usersTold)]
	text := strings.Join(told, "\n  ")
	if more := len(users) - len(told); more > 0 {
		text += fmt.Sprintf("\n  and %d more", more)
	}
	return meta.E("guard", meta.Busy, csi.Name, fmt.Errorf(`volumes of the driver are in use; without the driver these pods would lose the volumes:
  %s
First end these pods (scale down the objects that make them), and wait until their volumes are detached. To take the driver away all the same: helm uninstall --no-hooks; docs/kubernetes.md, "The driver is gone", has the steps for the nodes after that`, text))
}

// usersOf lists the users of a driver's volumes: pods on nodes, then attachments without a
// pod.
func usersOf(ctx context.Context, api *kube.API, driver string) ([]string, error) {
	volumes, err := api.PersistentVolumes(ctx)
	if err != nil {
		return nil, err
	}
	attachments, err := api.VolumeAttachments(ctx)
	if err != nil {
		return nil, err
	}
	// Pods come last: the volume of a pod created during these calls is then more likely in
	// the lists.
	pods, err := api.Pods(ctx)
	if err != nil {
		return nil, err
	}
	claimed := map[kube.Object]string{} // volumes by claims
	for _, v := range volumes {
		if v.Spec.CSI != nil && v.Spec.CSI.Driver == driver && v.Spec.ClaimRef != nil {
			claimed[kube.Object{Namespace: v.Spec.ClaimRef.Namespace, Name: v.Spec.ClaimRef.Name}] = v.Metadata.Name
		}
	}
	var users []string
	told := map[string]bool{} // node and volume
	for _, p := range pods {
		if p.Spec.NodeName == "" || p.Ended() {
			continue // no volume is mounted for the pod
		}
		for _, v := range p.Spec.Volumes {
			what := ""
			if claim := v.Claim(p.Metadata.Name); claim != "" {
				volume := claimed[kube.Object{Namespace: p.Metadata.Namespace, Name: claim}]
				if volume == "" {
					continue // another driver's
				}
				what = fmt.Sprintf("claim %s (%s)", claim, volume)
				told[p.Spec.NodeName+" "+volume] = true
			} else if v.CSI != nil && v.CSI.Driver == driver {
				what = "its own volume " + v.Name
			}
			if what != "" {
				users = append(users, fmt.Sprintf("pod %s/%s on node %s has %s", p.Metadata.Namespace, p.Metadata.Name, p.Spec.NodeName, what))
			}
		}
	}
	slices.Sort(users)
	var attached []string
	for _, x := range attachments {
		volume := x.Spec.Source.PersistentVolumeName
		if x.Spec.Attacher == driver && !told[x.Spec.NodeName+" "+volume] {
			attached = append(attached, fmt.Sprintf("node %s has volume %s attached (%s)", x.Spec.NodeName, volume, x.Metadata.Name))
		}
	}
	slices.Sort(attached)
	return append(users, attached...), nil
}
