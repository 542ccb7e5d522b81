package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"

	"penstock.io/penstock/meta"
)

// Pod has the fields of a pod that name its volumes and its node.
type Pod struct {
	Metadata Object `json:"metadata"`
	Spec     struct {
		NodeName string      `json:"nodeName"`
		Volumes  []PodVolume `json:"volumes"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// Ended reports that no container of a pod runs or will run.
func (p *Pod) Ended() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }

// Object has the fields by which all objects are known.
type Object struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// PodVolume is a volume of a pod: of a claim, of a claim made for the pod, or inline.
type PodVolume struct {
	Name                  string `json:"name"`
	PersistentVolumeClaim *struct {
		ClaimName string `json:"claimName"`
	} `json:"persistentVolumeClaim"`
	Ephemeral *struct{} `json:"ephemeral"`
	CSI       *struct {
		Driver string `json:"driver"`
	} `json:"csi"`
}

// Claim returns the name of the claim behind a pod's volume; "": no claim.
func (v *PodVolume) Claim(pod string) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return pod + "-" + v.Name
	}
	return ""
}

// PersistentVolume has the fields of a persistent volume that name its driver and its
// volume.
type PersistentVolume struct {
	Metadata Object `json:"metadata"`
	Spec     struct {
		ClaimRef *Object `json:"claimRef"`
		CSI      *struct {
			Driver string `json:"driver"`
		} `json:"csi"`
	} `json:"spec"`
}

// VolumeAttachment says that a volume is attached, or is to be attached, to a node.
type VolumeAttachment struct {
	Metadata Object `json:"metadata"`
	Spec     struct {
		Attacher string `json:"attacher"`
		NodeName string `json:"nodeName"`
		Source   struct {
			PersistentVolumeName string `json:"persistentVolumeName"`
		} `json:"source"`
	} `json:"spec"`
}

// Pods lists the pods of all namespaces.
func (a *API) Pods(ctx context.Context) ([]Pod, error) { return list[Pod](ctx, a, "/api/v1/pods") }

// PersistentVolumes lists all.
func (a *API) PersistentVolumes(ctx context.Context) ([]PersistentVolume, error) {
	return list[PersistentVolume](ctx, a, "/api/v1/persistentvolumes")
}

// VolumeAttachments lists all.
func (a *API) VolumeAttachments(ctx context.Context) ([]VolumeAttachment, error) {
	return list[VolumeAttachment](ctx, a, "/apis/storage.k8s.io/v1/volumeattachments")
}

// listed is the number of objects requested at a time: a page is then smaller than
// maxAnswer, unless objects are unusually large; list then requests smaller pages.
const listed = 100

// list reads all objects of a kind, page by page. Errors: AccessDenied, Unavailable (also
// if the list changed too long ago to be continued: the caller must read it again),
// Protocol.
func list[T any](ctx context.Context, a *API, path string) (all []T, err error) {
	limit, next := listed, ""
	for {
		q := url.Values{"limit": {strconv.Itoa(limit)}}
		if next != "" {
			q.Set("continue", next)
		}
		var page struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []json.RawMessage `json:"items"`
		}
		err := a.ask(ctx, http.MethodGet, path+"?"+q.Encode(), nil, &page)
		if meta.KindOf(err) == meta.Protocol && limit > 1 { // longer than an answer may be
			limit /= 4
			limit = max(limit, 1)
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, item := range page.Items {
			var x T
			if err := json.Unmarshal(item, &x); err != nil {
				return nil, meta.E("ask the API server", meta.Protocol, path, err)
			}
			all = append(all, x)
		}
		if next = page.Metadata.Continue; next == "" {
			return all, nil
		}
	}
}
